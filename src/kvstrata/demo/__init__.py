"""The demonstration: a prompt too long for plain vLLM, served from the same device budget and checked."""
