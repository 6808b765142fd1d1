"""The host in the world: asyncio driver, sockets and disk under the protocol machines."""
