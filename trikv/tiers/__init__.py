"""Places where pages are, and the ways to move them."""
