"""`trikv`: what an operator asks a running daemon."""
