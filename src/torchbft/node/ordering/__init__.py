"""CometBFT below the application: its home folder, process, signer and RPC."""
