from memtraffic.book import published
from memtraffic.ladder import naive
from memtraffic.tensors import matrix
from memtraffic.testing import assert_close
from memtraffic.traffic.count import count
from memtraffic.traffic.formula import formula


def test_softmax_argmax_is_right():
    x = matrix(5, 21)
    assert_close(published.softmax_argmax(x), naive.reference(x), x.dtype)


def test_softmax_argmax_also_writes_indices():
    assert str(formula(published.softmax_argmax)) == "reads 5MN + 2M, writes 3MN + 3M"
    [op, *_] = count(published.softmax_argmax, matrix(3, 5)).ops
    assert (op.name, op.written_elements, op.written_bytes) == ("max", 2 * 3, 3 * 4 + 3 * 8)


def test_load_bandwidth():
    frame = published.load_bandwidth()
    key = ["source", "series", "n_rows", "n_cols"]
    assert list(frame.columns) == [*key, "gb_per_s"]
    assert not frame.duplicated(key).any() and not frame.isna().any().any()
    assert frame["gb_per_s"].between(100, 5000).all()  # in GB/s, of one GPU
