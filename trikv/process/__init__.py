"""What each of our processes stands on: loops, sockets, logs, HTTP; daemon and meta alike."""
