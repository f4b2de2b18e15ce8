"""Remote read between engines: prefill publishes finished layers, decode pulls them into its own memory."""
