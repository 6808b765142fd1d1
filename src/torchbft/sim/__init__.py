"""The host in one process: virtual clock, network, disk and faults, all from one seed."""
