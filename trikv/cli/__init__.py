"""`trikv`: what an operator asks a running daemon, and replay of traces without one."""
