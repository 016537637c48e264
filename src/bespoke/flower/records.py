"""Messages as Flower's records: the head is a text in a ConfigRecord, each array the bytes of its ``.npy`` file."""

import ast

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from bespoke.network.messages import Message, MessageError

_HEAD, _ARRAYS, _JSON = "head", "arrays", "json"


def to_records(message: Message) -> RecordDict:
    """Return a message of our own as Flower's records."""
    arrays = ArrayRecord({name: _array(content) for name, content in message.leaves})
    return RecordDict({_HEAD: ConfigRecord({_JSON: message.head}), _ARRAYS: arrays})


def from_records(records: RecordDict) -> Message:
    """Return the message that records are; no array's content is looked at."""
    told, arrays = records.config_records.get(_HEAD), records.array_records.get(_ARRAYS)
    head = None if told is None else told.get(_JSON)
    if not isinstance(head, str) or arrays is None:
        raise MessageError("it is no message of this program's")
    return Message(head, [(name, array.data) for name, array in arrays.items()])


def _array(content: bytes) -> Array:
    """Return an array for Flower, whose tools want its type and shape; ``content`` was encoded here."""
    length = int.from_bytes(content[8:10], "little")
    header = ast.literal_eval(content[10 : 10 + length].decode())
    return Array(dtype=header["descr"], shape=header["shape"], stype="numpy.ndarray", data=content)
