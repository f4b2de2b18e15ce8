"""`kvstrata store serve`: what a store's backend needs, on one machine, in one process tree."""
