"""Transports over libraries that read memory one-sided: NIXL, Mooncake's and MemFabric's TransferEngine."""
