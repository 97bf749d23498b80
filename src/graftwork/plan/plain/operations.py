"""Operations on tensors that are only sizes: what each makes, keeps and takes on its way back.

Each follows PyTorch's derivative of the same name. Pure.
"""

from graftwork.plan.plain.tape import Tape, Tensor

FLOAT = 4


def cast(tape: Tape, x: Tensor, width: int) -> Tensor:
    if x.width == width:
        return x
    was = x.width
    return tape.made(tape.new(x.count, width), [x], lambda grads: [_cast_back(tape, grads, was)])


def _cast_back(tape: Tape, grads: list[Tensor], width: int) -> Tensor:
    gradient = grads.pop()
    return gradient if gradient.width == width else tape.new(gradient.count, width)


def clone(tape: Tape, x: Tensor) -> Tensor:
    return tape.made(tape.new(x.count, x.width), [x], lambda grads: [grads.pop()])


def scale(tape: Tape, x: Tensor) -> Tensor:
    """By a number."""

    def back(grads: list[Tensor]) -> list[Tensor]:
        return [tape.ahead.pop() if tape.ahead else tape.new(grads[0].count, grads[0].width)]

    return tape.made(tape.new(x.count, x.width), [x], back)


def negate(tape: Tape, x: Tensor) -> Tensor:
    return scale(tape, x)


def turned(tape: Tape, x: Tensor) -> Tensor:
    """A view whose gradient comes in another order and must be copied."""
    view = Tensor(x.storage, x.count, x.width)
    return tape.made(view, [x], lambda grads: [tape.new(grads[0].count, grads[0].width)])


def part_of(tape: Tape, x: Tensor, count: int) -> Tensor:
    """A slice: its gradient is as large as the whole."""
    whole, view = x.count, Tensor(x.storage, count, x.width)
    return tape.made(view, [x], lambda grads: [tape.new(whole, grads[0].width)])


def halves(tape: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two halves of one split: the gradients are put together again."""
    first, second = (Tensor(x.storage, x.count // 2, x.width) for _ in range(2))
    tape.made(first, [x], lambda grads: [tape.new(2 * grads[0].count, grads[0].width)])
    if first.edge is not None:
        second.edge = (first.edge[0], 1)
    return first, second


def join(tape: Tape, parts: list[Tensor]) -> Tensor:
    """Beside each other; the gradients are views of the whole's."""
    result = tape.new(sum(part.count for part in parts), max(part.width for part in parts))
    counts = [part.count for part in parts]

    def back(grads: list[Tensor]) -> list[Tensor]:
        whole = grads.pop()
        return [Tensor(whole.storage, count, whole.width).seen_otherwise() for count in counts]

    return tape.made(result, parts, back)


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    result = tape.new(max(a.count, b.count), max(a.width, b.width))
    widths = a.width, b.width
    needed = a.edge is not None, b.edge is not None

    def back(grads: list[Tensor]) -> list[Tensor | None]:
        gradient = grads.pop()
        both = zip(widths, needed, strict=True)
        return [_cast_back(tape, [gradient], width) if wanted else None for width, wanted in both]

    return tape.made(result, [a, b], back)


def multiply(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """Each factor is kept for the other's gradient, which is summed where the factor was spread."""
    result = tape.new(max(a.count, b.count), max(a.width, b.width))
    kept = (a.storage if b.edge else None, b.storage if a.edge else None)
    needed = ((a.count, a.width, a.edge is not None), (b.count, b.width, b.edge is not None))

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor | None]:
        raw = [tape.new(grads[0].count, grads[0].width) if wanted else None for *_, wanted in needed]
        grads.pop()
        for place, (count, width, _wanted) in enumerate(needed):
            one = raw[place]
            if one is not None and one.count != count:
                raw[place] = one = tape.new(count, one.width)
            if one is not None and one.width != width:
                raw[place] = tape.new(count, width)
            del one
        return raw

    return tape.made(result, [a, b], back)


def activate(tape: Tape, x: Tensor) -> Tensor:
    """SiLU or GELU: the input is kept."""
    kept = x.storage

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor]:
        return [tape.new(grads[0].count, grads[0].width)]

    return tape.made(tape.new(x.count, x.width), [x], back)


def mean_square(tape: Tape, x: Tensor, places: int) -> Tensor:
    """x.pow(2).mean(-1): on the way back four tensors as large as x stand beside each other."""
    kept = x.storage
    squares = tape.new(x.count, x.width)
    result = tape.new(places, x.width)
    del squares
    count, width = x.count, x.width

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor]:
        grads.clear()
        spread = tape.new(count, width)
        power, doubled = tape.new(count, width), tape.new(count, width)
        made = tape.new(count, width)
        del spread, power, doubled
        return [made]

    return tape.made(result, [x], back)


def inverse_root(tape: Tape, x: Tensor) -> Tensor:
    shifted = tape.made(tape.new(x.count, x.width), [x], lambda grads: [grads.pop()])
    result = tape.new(shifted.count, shifted.width)
    kept = result.storage

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor]:
        temporary = [tape.new(grads[0].count, grads[0].width) for _ in range(2)]
        made = tape.new(grads[0].count, grads[0].width)
        temporary.clear()
        return [made]

    return tape.made(result, [shifted], back)


def linear(
    tape: Tape, x: Tensor, weight: Tensor, *, outputs: int, bias: Tensor | None = None, last: bool = False
) -> Tensor:
    """A product with a weight: the input is kept where the weight is trained, the weight where the input is.

    `last`: nothing behind it is kept, so that running a layer again ends here.
    """
    inputs = weight.count // outputs
    places = x.count // inputs
    tape.muted |= last
    result = tape.new(places * outputs, x.width)
    tape.multiply_matrices()
    kept = (x.storage if weight.edge else None, weight.storage if x.edge else None)
    needed = x.edge is not None, weight.edge is not None, bias is not None and bias.edge is not None
    size = weight.count

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor | None]:
        width = grads[0].width
        of_bias = tape.new(outputs, width) if needed[2] else None
        of_weight = tape.new(size, width).seen_otherwise() if needed[1] else None
        if needed[1]:
            tape.multiply_matrices()
        of_input = tape.new(places * inputs, width).seen_otherwise() if needed[0] else None
        tape.multiply_matrices()
        return [of_input, of_weight, of_bias]

    return tape.made(result, [x, weight, *([bias] if bias else [])], back)


def embed(tape: Tape, weight: Tensor, *, places: int, hidden: int) -> Tensor:
    size = weight.count
    result = tape.new(places * hidden, weight.width)

    def back(grads: list[Tensor]) -> list[Tensor]:
        made = tape.new(size, grads[0].width)
        tape.stream.use_together([places * 8] * 2)
        return [made]

    return tape.made(result, [weight], back)
