"""Reading targets: one scrape, the loop over all targets, and what is learned about them on the way."""
