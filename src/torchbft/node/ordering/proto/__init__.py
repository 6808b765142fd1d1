"""Messages of CometBFT that we read and write: field numbers are its specification's."""
