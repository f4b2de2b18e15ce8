"""Host memory: regions shared between processes, page views, and the host home of KV."""
