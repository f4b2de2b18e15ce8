"""The proxy in front of prefill and decode engines: routing, the metaserver, retries, metrics."""
