"""What tests share."""


def train(clients, *args):
    """A round in which everyone who answered is accepted."""
    trained = clients.train(*args)
    clients.accept(trained.uploads.clients.tolist())
    return trained
