"""The catalogue's image sets. Every hash here was computed from the real arrays or found in a publication."""

from dataclasses import replace

from bespoke.data.examples import Examples
from bespoke.data.sources.content import sort_test_rows
from bespoke.data.sources.entry import Entry, File
from bespoke.data.sources.formats import idx_reader, read_cifar10, read_cifar100, read_mat, read_usps
from bespoke.data.sources.pictures import read_mnist_m, read_synthetic_12k, read_tiny_imagenet

_TORCHVISION = "addresses and MD5 as in torchvision's source"
_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
_FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_QMNIST = ("https://raw.githubusercontent.com/facebookresearch/qmnist/master/",)
_EMNIST = File(
    "gzip.zip",
    ("https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",),
    "58c8d27c78d21e728a6bc7b3cc06412e",
    shared="emnist",
)
_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
_STANFORD = "http://ufldl.stanford.edu/housenumbers/"
_MNIST_COUNTS = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)


def _files(bases: tuple[str, ...], *named: tuple[str, str]) -> tuple[File, ...]:
    return tuple(File(name, tuple(base + name for base in bases), md5) for name, md5 in named)


_MNIST_FILES = _files(
    _MNIST,
    ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
)


def _without_test_marks(examples: Examples) -> Examples:
    """Drop the official test marks: no writer is in both parts, so each writer's rows are split instead."""
    return replace(examples, official_test=None)


def _emnist(variant: str, doc: str, classes: int, *sizes: tuple[int, int], first_label: int = 0) -> Entry:
    return Entry(
        name=f"emnist_{variant}",
        doc=doc,
        licence="none stated; a work of the US government (NIST)",
        page="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        source=f"{_TORCHVISION}, sizes as in the catalogue of TensorFlow Datasets",
        classes=classes,
        shapes=((1, 28, 28),),
        sizes=sizes,
        files=(_EMNIST,),
        read=idx_reader(f"emnist-{variant}-", first_label),
    )


IMAGES = (
    Entry(
        name="mnist",
        doc="70,000 handwritten digits, 28x28 grey, 10 classes",
        licence="CC BY-SA 3.0 (as stated by its mirrors; the official page names none)",
        page="http://yann.lecun.com/exdb/mnist/",
        source=_TORCHVISION,
        classes=10,
        shapes=((1, 28, 28),),
        sizes=((60000, 10000),),
        counts=_MNIST_COUNTS,
        files=_MNIST_FILES,
        read=idx_reader(),
        content_hash="3c6010c2a648f5f96085d718c0e3cd685a2b61784f077b055b15d79442aca15d",
        order_hash="64c0b275b3aa7ef099112503f57b6095740a592d8e43502742c135f3aabe7ccc",
    ),
    Entry(
        name="mnist_writers",
        doc="MNIST by its 836 real writers, each a client",
        licence="as MNIST; the writers are QMNIST's (BSD 3-Clause)",
        page="https://github.com/facebookresearch/qmnist",
        source=_TORCHVISION,
        classes=10,
        shapes=((1, 28, 28),),
        sizes=((70000, 0),),
        counts=_MNIST_COUNTS,
        owners=836,
        files=_MNIST_FILES
        + _files(
            _QMNIST,
            ("qmnist-train-labels-idx2-int.gz", "0058f8dd561b90ffdd0f734c6a30e5e4"),
            ("qmnist-test-labels-idx2-int.gz", "5b5b05890a5e13444e108efe57b788aa"),
        ),
        read=idx_reader(),
        canonical=_without_test_marks,
        content_hash="2a003ad4469c8ad9910cb38966f594bf389b32cc14380f172b797f1f85d380a1",
        order_hash="0077e73fdf1ea66a8513d1faadb0d8fbcdb2130f3ca7f2c8a23c0cb65bb5c395",
    ),
    Entry(
        name="fashion_mnist",
        doc="70,000 pieces of clothing, 28x28 grey, 10 classes",
        licence="MIT",
        page="https://github.com/zalandoresearch/fashion-mnist",
        source=_TORCHVISION,
        classes=10,
        shapes=((1, 28, 28),),
        sizes=((60000, 10000),),
        counts=(7000,) * 10,
        files=_files(
            _FASHION,
            ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        read=idx_reader(),
        content_hash="2a5dee2ad72843c846a31843606a4aa6c91e491e1875a0d36072b0a24f946546",
        order_hash="41289564b862a3654b0d86aa7bfad73b158e6c82f0bae6603744e540bf583265",
    ),
    _emnist("balanced", "131,600 handwritten characters, 28x28 grey, 47 classes of 2,800", 47, (112800, 18800)),
    _emnist("byclass", "814,255 handwritten characters, 28x28 grey, 62 classes", 62, (697932, 116323)),
    _emnist(
        "letters", "Handwritten letters, 28x28 grey, 26 classes", 26, (124800, 20800), (88800, 14800), first_label=1
    ),
    Entry(
        name="cifar10",
        doc="60,000 photographs, 32x32 colour, 10 classes",
        licence="none stated; the authors ask to be cited",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        source="address and MD5 as on the official page",
        classes=10,
        shapes=((3, 32, 32),),
        sizes=((50000, 10000),),
        counts=(6000,) * 10,
        files=_files((_TORONTO,), ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")),
        read=read_cifar10,
        content_hash="5de405b43efc01ffeb6636945981db548113865055f8d347b00a5271a8afdc9a",
        order_hash="9aaa62985e01fe920713ef95989d5a8cb34e441c92a4e50c25f8f9d572c88e4f",
    ),
    Entry(
        name="cifar100",
        doc="60,000 photographs, 32x32 colour, 100 classes",
        licence="none stated; the authors ask to be cited",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        source="address and MD5 as on the official page",
        classes=100,
        shapes=((3, 32, 32),),
        sizes=((50000, 10000),),
        counts=(600,) * 100,
        files=_files((_TORONTO,), ("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8")),
        read=read_cifar100,
        canonical=sort_test_rows,
        content_hash="ceaedf405760547578021c1a499597179cf8b254b6753730d0ac32a2d8c4e1ec",
        order_hash="42db4f6ff72cb7f38e46612997899d4c10d51dac8e534e2f8321f14e3908ab5f",
    ),
    Entry(
        name="tiny_imagenet",
        doc="110,000 photographs, 64x64 colour, 200 classes; the official validation rows are the test rows",
        licence="that of ImageNet: research only",
        page="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        source="address and MD5 as in several public loaders",
        classes=200,
        shapes=((3, 64, 64),),
        sizes=((100000, 10000),),
        counts=(550,) * 200,
        files=_files(("http://cs231n.stanford.edu/",), ("tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de")),
        read=read_tiny_imagenet,
    ),
    Entry(
        name="svhn",
        doc="99,289 house numbers, 32x32 colour, 10 classes; without the extra rows",
        licence="non-commercial use",
        page="http://ufldl.stanford.edu/housenumbers/",
        source=_TORCHVISION,
        classes=10,
        shapes=((3, 32, 32),),
        sizes=((73257, 26032),),
        files=_files(
            (_STANFORD,),
            ("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
            ("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
        ),
        read=read_mat,
    ),
    Entry(
        name="usps",
        doc="9,298 handwritten digits of postcodes, 16x16 grey, 10 classes",
        licence="none stated",
        page="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
        source=_TORCHVISION,
        classes=10,
        shapes=((1, 16, 16),),
        sizes=((7291, 2007),),
        packed=16,  # text
        counts=(1553, 1269, 929, 824, 852, 716, 834, 792, 708, 821),
        files=_files(
            (_LIBSVM,),
            ("usps.bz2", "ec16c51db3855ca6c91edd34d0e9b197"),
            ("usps.t.bz2", "8ea070ee2aca1ac39742fdd1ef5ed118"),
        ),
        read=read_usps,
        content_hash="b905fa524934183cab6c0f315ff3e1046bca86fa94c4c96edfc0d414675d4ca2",
        order_hash="26028e0a7ef49cb76a6e80b4747cdb25cae58c991b4391e112518e3e243c0148",
    ),
    Entry(
        name="mnist_m",
        doc="MNIST digits over patches of photographs, colour, 10 classes; 32x32, or 28x28 in the edition of 70,000",
        licence="none stated",
        page="http://yaroslav.ganin.net/",
        source="address and MD5 as in the source of PyTorch Adapt",
        classes=10,
        shapes=((3, 32, 32), (3, 28, 28)),
        most=70_000,
        held_out=True,
        files=(
            File(
                "mnist_m.tar.gz",
                ("https://cornell.box.com/shared/static/jado7quprg6hzzdubvwzh9umr75damwi",),
                "859df31c91afe82e80e5012ba928f279",
            ),
        ),
        read=read_mnist_m,
    ),
    Entry(
        name="syn_digits",
        doc="488,953 synthetic digits of Ganin and Lempitsky, 32x32 colour, 10 classes",
        licence="none stated",
        page="http://yaroslav.ganin.net/",
        source="address as in several public loaders; the sum of the sizes as in FedBN's source",
        classes=10,
        shapes=((3, 32, 32),),
        sizes=((479400, 9553),),
        files=(File("SynthDigits.zip", ("https://drive.google.com/uc?id=0B9Z4d7lAwbnTSVR1dEFSRUFxOUU",)),),
        read=read_mat,
    ),
    Entry(
        name="syn_digits_12k",
        doc="12,000 synthetic digits of Roy et al. on photographs, resized to 32x32 colour, 10 classes",
        licence="see its page",
        page="https://www.kaggle.com/datasets/prasunroy/synthetic-digits",
        source="page and number of rows as in the authors' repository cnn-on-degraded-images",
        classes=10,
        shapes=((3, 32, 32),),
        most=12_000,
        packed=256,  # its pictures are resized
        hint="it needs an account: download the zip archive from its page",
        read=read_synthetic_12k,
    ),
)
