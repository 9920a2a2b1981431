"""Who may talk to whom, decided before anything that a peer sends is decoded."""
