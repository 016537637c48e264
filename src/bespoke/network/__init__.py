"""A federation over a network, whatever carries its messages: what is sent, the node's side, and the server's side."""
