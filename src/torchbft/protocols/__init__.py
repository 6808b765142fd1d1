"""Sans-I/O machines of the protocols, and the state machines that they agree on."""
