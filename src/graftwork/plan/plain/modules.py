"""A decoder's modules as transformers, PEFT and bitsandbytes run them, on tensors that are only sizes. Pure.

Variables are held and dropped in the order in which the originals do it: that is what a peak is made of.
"""

from typing import NamedTuple

from graftwork.model.trace.sizes import (
    QUANTISED_BLOCK,
    SCALES_BLOCK,
    dequantised_sizes,
    flash_backward_sizes,
)
from graftwork.plan.plain.operations import (
    add,
    cast,
    clone,
    inverse_root,
    join,
    linear,
    mean_square,
    multiply,
    negate,
    part_of,
    scale,
)
from graftwork.plan.plain.tape import Storage, Tape, Tensor, Weight
from graftwork.records.fit import PlainSetup

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT = 4


class Machinery:
    """What all modules of a step share: the tape, the setting, and the casts that autocast remembers."""

    def __init__(self, tape: Tape, setup: PlainSetup) -> None:
        self.tape, self.setup = tape, setup
        self.low = min(WIDTHS[setup.dtype], 2)
        self.places = setup.rows * setup.tokens
        self.again = False
        """A layer runs a second time."""
        self._casts: dict[int, Tensor] = {}

    def as_low(self, weight: Weight) -> Tensor:
        """A weight as autocast gives it to a product: casts of trained float32 ones are remembered."""
        tensor = self.tape.leaf(weight)
        if not self.setup.autocast or weight.width == self.low:
            return tensor
        if not weight.trained or not self.tape.learning:
            return cast(self.tape, tensor, self.low)
        if id(weight) not in self._casts:
            self._casts[id(weight)] = cast(self.tape, tensor, self.low)
        return self._casts[id(weight)]

    def forget_casts(self) -> None:
        self._casts.clear()

    def product(
        self, x: Tensor, weight: Weight, *, outputs: int, bias: Weight | None = None, last: bool = False
    ) -> Tensor:
        tape = self.tape
        if self.setup.autocast:
            x = cast(tape, x, self.low)
        beside = self.as_low(bias) if bias is not None else None
        return linear(tape, x, self.as_low(weight), outputs=outputs, bias=beside, last=last and self.again)


class Linear:
    """A linear layer, in four bits or not, with adapters or not."""

    def __init__(
        self,
        sizes: tuple[int, int],
        setup: PlainSetup,
        *,
        bias: bool = False,
        adapted: bool = False,
        trained: bool = False,
    ) -> None:
        self.inputs, self.outputs = sizes
        count, width = sizes[0] * sizes[1], WIDTHS[setup.dtype]
        self.four = setup.method == "qlora"
        self.last = False
        """Of its layer."""
        self.weights = [Weight((count + 1) // 2, 1)] if self.four else [Weight(count, width, trained=trained)]
        if self.four:
            blocks = -(-count // QUANTISED_BLOCK)
            self.weights += [
                Weight(blocks, 1),
                Weight(16, 4),
                Weight(1, 4),
                Weight(-(-blocks // SCALES_BLOCK), 4),
            ]
        self.bias: Weight | None = None
        if bias:
            wide = FLOAT if self.four and setup.kbit_upcast else width
            self.bias = Weight(self.outputs, wide, trained=trained)
            self.weights.append(self.bias)
        self.adapter: tuple[Weight, Weight] | None = None
        self.magnitude: Weight | None = None
        if adapted:
            wide = WIDTHS[setup.adapter_dtype]
            self.adapter = (
                Weight(sizes[0] * setup.rank, wide, trained=True),
                Weight(sizes[1] * setup.rank, wide, trained=True),
            )
            self.weights += self.adapter
            if setup.method == "dora":
                self.magnitude = Weight(sizes[1], wide, trained=True)
                self.weights.append(self.magnitude)

    def run(self, shared: Machinery, given: Tensor) -> Tensor:
        """What is given is held by the call until it returns."""
        x = given
        result = self._base(shared, x)
        if self.adapter is None:
            return result
        tape, setup = shared.tape, shared.setup
        if self.four:
            result = clone(tape, result)
        kind = result.width
        if not self.four or not setup.autocast:
            x = cast(tape, x, self.adapter[0].width)
        if self.magnitude is not None:
            return cast(tape, self._dora(shared, x, result), kind)
        if not self.four:
            result = add(tape, result, self._adapted(shared, x))
            return cast(tape, result, kind)
        output = self._adapted(shared, x)
        if not setup.autocast:
            output = cast(tape, output, kind)
        return add(tape, result, output)

    def _adapted(self, shared: Machinery, x: Tensor) -> Tensor:
        assert self.adapter is not None
        down, up = self.adapter
        narrow = shared.product(x, down, outputs=shared.setup.rank)
        return scale(shared.tape, shared.product(narrow, up, outputs=self.outputs, last=self.last))

    def _base(self, shared: Machinery, x: Tensor) -> Tensor:
        if not self.four:
            last = self.last and self.adapter is None
            return shared.product(x, self.weights[0], outputs=self.outputs, bias=self.bias, last=last)
        kind = x.width
        low = cast(shared.tape, x, shared.low)
        result = cast(shared.tape, self._four_bits(shared, low), kind)
        del low
        return result

    def _four_bits(self, shared: Machinery, x: Tensor) -> Tensor:
        """The weights are put in half precision on the way forward and again on the way back."""
        tape, weights = shared.tape, self.inputs * self.outputs
        whole = [tape.new(size, 1, part="workspace") for size in dequantised_sizes(weights, x.width)]
        result = tape.new(x.count // self.inputs * self.outputs, x.width)
        tape.multiply_matrices()
        del whole
        count = x.count

        def back(grads: list[Tensor]) -> list[Tensor]:
            whole = [tape.new(size, 1) for size in dequantised_sizes(weights, grads[0].width)]
            del whole[0]
            return [tape.new(count, grads[0].width)]

        return tape.made(result, [x], back)

    def _dora(self, shared: Machinery, x: Tensor, result: Tensor) -> Tensor:
        """The product of the adapter's factors as a whole weight, its norm, and the output scaled by both."""
        tape, setup = shared.tape, shared.setup
        assert self.adapter is not None
        assert self.magnitude is not None
        down, up = self.adapter
        ones = tape.new(self.inputs * self.inputs, down.width)
        whole = shared.product(shared.product(ones, down, outputs=setup.rank), up, outputs=self.outputs)
        del ones
        whole = cast(tape, whole, x.width)
        summed = _detached_norm(tape, whole, x.width)
        ratio = scale(tape, tape.leaf(self.magnitude))
        del whole, summed
        outside = shared.product(shared.product(x, down, outputs=setup.rank), up, outputs=self.outputs)
        extra = add(
            tape, multiply(tape, scale(tape, ratio), result), scale(tape, multiply(tape, ratio, outside))
        )
        return add(tape, result, extra)


def _detached_norm(tape: Tape, whole: Tensor, width: int) -> Tensor:
    scaled = tape.new(whole.count, width)
    summed = tape.new(whole.count, width)
    del scaled
    return summed


class Norm:
    """RMSNorm in float32. Styles differ in when the weight comes in and the result goes back to its type."""

    def __init__(self, size: int, setup: PlainSetup, *, style: str = "llama", trained: bool = False) -> None:
        width = FLOAT if setup.method == "qlora" and setup.kbit_upcast else WIDTHS[setup.dtype]
        self.size, self.style = size, style
        self.last = False
        """Of its layer."""
        self.weight = Weight(size, width, trained=trained)
        self.weights = [self.weight]

    def run(self, shared: Machinery, x: Tensor) -> Tensor:
        tape, kind, rows = shared.tape, x.width, x.count // self.size
        hidden = cast(tape, x, FLOAT)
        if self.style == "gemma":
            output = multiply(tape, hidden, inverse_root(tape, mean_square(tape, hidden, rows)))
            del hidden
            output = multiply(tape, output, scale(tape, cast(tape, tape.leaf(self.weight), FLOAT)))
            return cast(tape, output, kind)
        variance = mean_square(tape, hidden, rows)
        hidden = multiply(tape, hidden, inverse_root(tape, variance))
        if self.style == "olmo2":
            tape.muted |= self.last and shared.again
            return cast(tape, multiply(tape, tape.leaf(self.weight), hidden), kind)
        return multiply(tape, tape.leaf(self.weight), cast(tape, hidden, kind))


class Heads(NamedTuple):
    """The sizes of attention."""

    queries: int
    keys: int
    size: int


def rotate(shared: Machinery, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """Positions by rotation: half of each head is turned over."""
    tape = shared.tape
    cos, sin = waves
    first = multiply(tape, x, cos)
    return add(tape, first, multiply(tape, _half_turned(tape, x), sin))


def _half_turned(tape: Tape, x: Tensor) -> Tensor:
    one, other = part_of(tape, x, x.count // 2), part_of(tape, x, x.count // 2)
    return join(tape, [negate(tape, other), one])


def rotate_part(shared: Machinery, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """As Phi-3 does it: the rotated part and the rest are put beside each other, though there is no rest."""
    tape = shared.tape
    inner, rest = part_of(tape, x, x.count), Tensor(x.storage, 0, x.width)
    return join(tape, [rotate(shared, inner, waves), rest])


def attend(
    shared: Machinery, q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, in_order: bool = True
) -> Tensor:
    """Flash attention: queries, keys, values, the output and a row of sums are kept."""
    tape, setup = shared.tape, shared.setup
    if setup.autocast:
        q, k, v = cast(tape, q, shared.low), cast(tape, k, shared.low), cast(tape, v, shared.low)
    out = tape.new(q.count, q.width)
    sums = tape.new(setup.rows * heads.queries * setup.tokens, FLOAT)
    seed, offset = tape.new(2, 8), tape.new(1, 8)
    kept: list[Storage] = [one.storage for one in (q, k, v, out, sums, seed, offset)]
    counts = q.count, k.count, v.count
    del sums, seed, offset

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor]:
        width = grads[0].width
        made = [tape.new(count, width) for count in counts]
        tape.stream.use_together(
            flash_backward_sizes(
                setup.rows, setup.tokens, setup.tokens, heads.queries, heads.keys, heads.size, width
            )
        )
        return made

    result = tape.made(out, [q, k, v], back)
    return result if in_order else clone(tape, result)
