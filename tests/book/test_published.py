from memtraffic.kernels.softmax import naive
from memtraffic.meters.count import count
from memtraffic.meters.formula import formula
from memtraffic.tensors import matrix
from memtraffic.testing import assert_close
from memtraffic_book import published


def test_softmax_argmax_is_right():
    x = matrix(5, 21)
    assert_close(published.softmax_argmax(x), naive.reference(x), x.dtype)


def test_softmax_argmax_also_writes_indices():
    assert formula(published.softmax_argmax).text == "reads 5MN + 2M, writes 3MN + 3M"
    [op, *_] = count(published.softmax_argmax, matrix(3, 5)).ops
    assert (op.name, op.written_elements, op.written_bytes) == ("max", 2 * 3, 3 * 4 + 3 * 8)
