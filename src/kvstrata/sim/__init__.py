"""A seeded simulator of prefill, decode, proxy, network and transport around the real remote-read machines.

Time is virtual, every choice comes from the seed: a run that fails is repeated exactly by its number. Pages
hold what they are pages *of* instead of bytes, so that a foreign, stale or half-filled page is known by
looking at it.
"""
