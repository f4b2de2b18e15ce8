"""For tests of KVPP: ranks over real memory, in threads and in processes."""
