"""Record which rows decoding selects; replay such a trace through hot rows of other sizes and policies."""
