"""Tools that inspect a training: what a training loads never imports them."""
