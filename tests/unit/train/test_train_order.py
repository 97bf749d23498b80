"""Order and rate of the steps: decided by lengths and seed alone."""

from hypothesis import given
from hypothesis import strategies as st

from graftwork.train.order import choose_rows, plan_batches
from graftwork.train.schedule import learning_rate

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60).map(tuple)


@given(lengths=LENGTHS, batch_rows=st.integers(1, 9), epochs=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_row_stands_once_in_every_epoch(lengths, batch_rows, epochs, seed):
    batches = plan_batches(lengths, batch_rows=batch_rows, epochs=epochs, seed=seed)
    steps = -(-len(lengths) // batch_rows)
    assert len(batches) == steps * epochs
    for epoch in range(epochs):
        rows = [row for batch in batches[epoch * steps : (epoch + 1) * steps] for row in batch]
        assert sorted(rows) == list(range(len(lengths)))
    assert batches == plan_batches(lengths, batch_rows=batch_rows, epochs=epochs, seed=seed)


@given(lengths=LENGTHS, batch_rows=st.integers(1, 9))
def test_rows_of_like_length_share_a_batch(lengths, batch_rows):
    batches = plan_batches(lengths, batch_rows=batch_rows, epochs=1, seed=0)
    padded = sum(max(lengths[row] for row in batch) * len(batch) for batch in batches)
    ordered = sorted(lengths)
    best = sum(
        max(ordered[at : at + batch_rows]) * len(ordered[at : at + batch_rows])
        for at in range(0, len(ordered), batch_rows)
    )
    assert padded == best


def test_another_seed_is_another_order():
    lengths = tuple(range(1, 41))
    orders = {plan_batches(lengths, batch_rows=4, epochs=1, seed=seed) for seed in range(5)}
    assert len(orders) == 5


@given(count=st.integers(1, 200), most=st.integers(1, 200), seed=st.integers(0, 9))
def test_a_budget_of_rows_is_kept_and_stable(count, most, seed):
    chosen = choose_rows(count, most=most, seed=seed)
    assert len(chosen) == min(count, most) == len(set(chosen))
    assert list(chosen) == sorted(chosen)
    assert chosen == choose_rows(count, most=most, seed=seed)
    assert choose_rows(count, most=None, seed=seed) == tuple(range(count))


@given(steps=st.integers(1, 300), warmup=st.floats(0, 0.9))
def test_the_rate_rises_then_falls_and_no_step_is_wasted(steps, warmup):
    rates = [learning_rate(s, steps=steps, highest=1e-3, warmup_share=warmup) for s in range(1, steps + 1)]
    assert all(0 < rate <= 1e-3 for rate in rates)
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
