"""The catalogue's sets of people (writers, tweeters, speakers) and those built from other sets."""

from bespoke.data.sources.audio import read_audiomnist, read_speech_commands
from bespoke.data.sources.entry import Entry, File
from bespoke.data.sources.nist import read_femnist
from bespoke.data.sources.text import TOKENS, WORDS, read_sent140
from bespoke.data.sources.unions import DIGIT5, DIGITS2, DIGITS4, digit5, every_row, wake_word

_NIST = "https://s3.amazonaws.com/nist-srd/SD19/"
_ROOMS = ("Kino", "Ruheraum", "VR-room", "library")
_WAKE_DIGIT = 7  # "seven", the only digit besides zero with two syllables
_MARVIN = 16  # place of "marvin" among the 35 words

PEOPLE = (
    Entry(
        name="femnist",
        doc="Handwritten characters by writer (LEAF), 28x28 grey on white, 62 classes; each writer a client",
        licence="none stated; a work of the US government (NIST); LEAF's code: BSD 2-Clause",
        page="https://github.com/TalwalkarLab/leaf/tree/master/data/femnist",
        source="addresses as in LEAF's source, MD5 as in several public loaders",
        classes=62,
        shapes=((1, 28, 28),),
        most=814_255,  # in the archives of NIST; LEAF drops some
        packed=24,  # pixels as text
        owners=0,
        files=(
            File("by_class.zip", (_NIST + "by_class.zip",), "79572b1694a8506f2b722c7be54130c4"),
            File("by_write.zip", (_NIST + "by_write.zip",), "a29f21babf83db0bb28a2f77b2b456cb"),
        ),
        read=read_femnist,
    ),
    Entry(
        name="sent140",
        doc="Tweets of users with 30 or more, 25 tokens each, 2 classes; each user a client",
        licence="none stated; research use",
        page="http://help.sentiment140.com/for-students",
        source="address as on the official page, MD5 as in the source of datamaestro",
        classes=2,
        shapes=((TOKENS,),),
        dtype="int32",
        tokens=WORDS,
        most=1_600_000,  # tweets of all users
        owners=0,
        files=(
            File(
                "trainingandtestdata.zip",
                ("http://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",),
                "1647eb110dd2492512e27b9a70d5d1bc",
            ),
        ),
        read=read_sent140,
    ),
    Entry(
        name="speech_commands",
        doc="105,829 spoken words, log-mel 49x40, 35 classes; each speaker a client",
        licence="CC BY 4.0",
        page="https://arxiv.org/abs/1804.03209",
        source="address and MD5 as in torchaudio's source, number of rows as in the set's README",
        classes=35,
        shapes=((1, 49, 40),),
        sizes=((105829, 0),),
        packed=24,  # recordings
        owners=0,
        files=(
            File(
                "speech_commands_v0.02.tar.gz",
                (
                    "https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
                    "http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
                ),
                "6b74f3901214cb2c2934e98196829835",
            ),
        ),
        read=read_speech_commands,
    ),
    Entry(
        name="audiomnist",
        doc="30,000 spoken digits, log-mel 49x40, 10 classes; 60 speakers, each a client; four rooms as domains",
        licence="MIT",
        page="https://github.com/soerenab/AudioMNIST",
        source="address as in several public loaders; the hash is that of the ready arrays, not of the recordings",
        classes=10,
        shapes=((1, 49, 40),),
        sizes=((30000, 0),),
        packed=64,  # recordings
        counts=(3000,) * 10,
        owners=60,
        domains=_ROOMS,
        files=(
            File("AudioMNIST-master.zip", ("https://github.com/soerenab/AudioMNIST/archive/refs/heads/master.zip",)),
        ),
        read=read_audiomnist,
        content_hash="4ca8fdbf545ec4f4b012f6de3d04014fd9e57bd52413eafed1ffb23362ca8314",
        order_hash="ea926873f508a31ffc4c0b93c15ec899709f9d45e60e26298ee8e1d6333ee50f",
    ),
)

MADE = (
    Entry(
        name="digit5",
        doc="Digits of five domains, 32x32 colour, 10 classes, with the cut of FedBN: 184,699 rows",
        licence="those of its parts",
        page="https://github.com/med-air/FedBN",
        source="the rule of FedBN's data_preprocess.py",
        classes=10,
        shapes=((3, 32, 32),),
        domains=DIGIT5,
        held_out=True,
        parts=DIGIT5,
        build=digit5,
    ),
    Entry(
        name="digits4",
        doc="Digits of four domains, 32x32 colour, 10 classes: 190,587 rows",
        licence="those of its parts",
        page="",
        source="",
        classes=10,
        shapes=((3, 32, 32),),
        domains=DIGITS4,
        held_out=True,
        parts=DIGITS4,
        build=every_row(DIGITS4),
    ),
    Entry(
        name="digits2",
        doc="Digits of two domains, MNIST and USPS, 32x32 colour, 10 classes: 79,298 rows",
        licence="those of its parts",
        page="",
        source="",
        classes=10,
        shapes=((3, 32, 32),),
        domains=DIGITS2,
        held_out=True,
        parts=DIGITS2,
        build=every_row(DIGITS2),
    ),
    Entry(
        name="audiomnist_wake",
        doc='AudioMNIST as a wake-word task: the word "seven" or not, 2 classes',
        licence="MIT",
        page="https://github.com/soerenab/AudioMNIST",
        source="",
        classes=2,
        shapes=((1, 49, 40),),
        owners=60,
        domains=_ROOMS,
        parts=("audiomnist",),
        build=wake_word(_WAKE_DIGIT),
        stored=False,
    ),
    Entry(
        name="speech_commands_wake",
        doc='Speech Commands as a wake-word task: the word "marvin" or not, 2 classes',
        licence="CC BY 4.0",
        page="https://arxiv.org/abs/1804.03209",
        source="",
        classes=2,
        shapes=((1, 49, 40),),
        owners=0,
        parts=("speech_commands",),
        build=wake_word(_MARVIN),
        stored=False,
    ),
)
