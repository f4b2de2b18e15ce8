"""`kvstrata serve-pd`: prefill engines, decode engines and the proxy on one machine, in one process tree."""
