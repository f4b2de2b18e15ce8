"""Stores whose bytes lie in a pool that another engine runs: Mooncake Store, MemCache.

A `PoolClient` speaks to the pool; `PooledStore` makes a `Store` of it and knows nothing of any library.
"""
