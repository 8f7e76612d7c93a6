"""Remote engines: HTTP servers, and how the trainer speaks to them."""
