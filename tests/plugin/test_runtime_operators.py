"""Hand-written modules and operators on a real daemon, bit by bit against eager, and what is refused with which advice."""

import pytest
import torch
import torch.nn.functional as F
from case import Case, check
from torch import nn

import slicescheduler


def normal(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


X = normal(3, 4)
SQUARE = normal(4, 4)
IMAGE = normal(2, 4, 6, 6)
ROWS = torch.tensor([[3, 1, 0, 2], [0, 2, 1, 3], [2, 3, 1, 0], [1, 0, 3, 2]])
QKV = (normal(2, 4, 6, 8), normal(2, 4, 6, 8, seed=1), normal(2, 4, 6, 8, seed=2))
COMPLEX = torch.complex(normal(3, 4), normal(3, 4, seed=1))
BYTES = (20 * normal(4, 8)).to(torch.int8)


def layers(*modules):
    """Module in eval mode; batch norms get statistics that matter."""
    torch.manual_seed(0)
    made = nn.Sequential(*(module() for module in modules)).eval()
    for module in made:
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return made


def conv_net():
    return layers(
        lambda: nn.Conv2d(4, 8, 3, padding=1), lambda: nn.BatchNorm2d(8), nn.ReLU, lambda: nn.MaxPool2d(2),
        lambda: nn.Conv2d(8, 8, 2, groups=2), lambda: nn.AvgPool2d(2, 1), lambda: nn.AdaptiveAvgPool2d(1), nn.Flatten,
        lambda: nn.Linear(8, 5),
    )  # fmt: skip


def rotary(x):
    angles = torch.arange(x.shape[1])[:, None] / 10000 ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)


def nucleus(logits):
    ordered, order = torch.sort(logits, descending=True, dim=-1)
    drop = F.softmax(ordered, -1).cumsum(-1) > 0.8
    drop[..., 1:] = drop[..., :-1].clone()
    drop[..., 0] = False
    return logits.masked_fill(drop.scatter(1, order, drop), -torch.inf)


def index_put(x, rows, values):
    y = x.clone()
    y[rows] = values
    y[:, 1] = 3.0
    y.diagonal().fill_(5.0)
    return y


def math_attention(q, k, v):
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


FUNCTIONS = {
    "reductions": (
        lambda x: (x.max(), x.min(), x.aminmax(), x.prod(), x.median(), x.std(), torch.std_mean(x, 1), x.nansum(),
                   x.count_nonzero(), x.norm(), x.norm(p=1, dim=0), x.cummax(0), x.cummin(1), x.logcumsumexp(1)), X),
    "pointwise": (
        lambda x: (x.acos(), x.acosh(), x.asin(), x.asinh(), x.atan(), x.atanh(), x.tan(), x.sinh(), x.cosh(), x.erfc(),
                   x.sigmoid().erfinv(), x.exp2(), x.log2(), x.log10(), x.frac(), x.trunc(), x.round(decimals=1),
                   x.nan_to_num(), x.sgn(), x.signbit(), x.sinc(), x.sigmoid().logit(), x.deg2rad(), x.rad2deg()), X),
    "binary": (
        lambda x, y: (torch.fmax(x, y), torch.fmin(x, y), x.fmod(y), x.hypot(y), x.copysign(y), torch.xlogy(x, y.abs()),
                      torch.logaddexp(x, y), torch.logaddexp2(x, y), x.lerp(y, 0.3), x.lerp(y, x), x.clamp(y, y + 1),
                      torch.addcmul(x, x, y, value=0.5), torch.addcdiv(x, x, y), torch.isin(x, y),
                      torch.clamp(x, max=y), torch.clamp(x, min=y)), X, normal(3, 4, seed=1)),
    "activations": (
        lambda x: (F.prelu(x, torch.tensor([0.2])), F.celu(x), F.logsigmoid(x), F.threshold(x, 0.1, 0.2), F.selu(x), F.glu(x)),
        X),
    "matrices": (
        lambda a, v: (torch.addmv(v, a, v), torch.addr(a, v, v), torch.vdot(v, v), torch.addbmm(a, a[None], a[None]),
                      torch.trace(a), a.diag(), torch.diag_embed(a), torch.block_diag(a, a), torch.eye(3) @ a[:3],
                      torch.cdist(a, a), torch.linalg.cross(a[:, :3], a[:, 1:]), torch.einsum("ii->i", a)),
        SQUARE, SQUARE[0]),
    "views": (
        lambda x: (x.diagonal(), x.unfold(1, 2, 1).mean(-1), x.view(torch.int32), torch.unsafe_split(x, 2, 1), x.rot90()), X),
    "views of results": (lambda x: [part + 1 for part in torch.unsafe_chunk(x * 2, 2, 1)] + [(x * 2).unfold(0, 2, 1)], X),
    "gather and scatter": (
        lambda x, i: (x.gather(1, i), x.scatter_add(1, i, x), x.scatter_reduce(1, i, x, "amax"), x.take(i),
                      x.index_fill(0, i[0], torch.tensor(2.0))), SQUARE, ROWS),
    "index_put": (index_put, SQUARE, torch.tensor([0, 2]), normal(2, 4, seed=1)),
    "masks": (
        lambda x, m: (x.masked_fill(m, -1), torch.where(m, x, 0.0), x.masked_scatter(m, x * 3), x.masked_fill(m, x[0, 0])),
        SQUARE, SQUARE > 0),
    "nucleus sampling": (nucleus, normal(3, 20)),
    "top-k sampling": (lambda x: (torch.topk(x, 3, -1), x.argmax(-1), x.max(-1), F.softmax(x, -1)), X),
    "integers": (
        lambda x: (x << 1, x >> 1, x | 1, x ^ 2, x & 3, torch.bitwise_left_shift(x, x.clamp(0, 3)), x.max()), BYTES),
    "int8 weights": (lambda x, w, s: F.linear(x, w.to(x.dtype) * s), normal(4, 8).bfloat16(), BYTES, torch.tensor(0.1)),
    "int8 product": (torch._int_mm, torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8)),
    "fake quantization": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), X),
    "one_hot": (lambda i: F.one_hot(i, 5), ROWS),
    "complex rotary": (rotary, normal(2, 5, 2, 8)),
    "complex": (
        lambda z: (z * z.conj(), (z + 1).conj(), z.imag, z.abs(), z.angle(), torch.view_as_real(z), (2 * z).conj().imag), COMPLEX),
    "conjugated input": (lambda z: z * 2, COMPLEX.conj()),
    "spectrum": (lambda x: (torch.fft.rfft(x).abs(), torch.fft.fft2(x).real, torch.stft(x, 2, 1, return_complex=True).abs()), X),
    "pixel shuffles": (lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2)), IMAGE),
    "patches": (lambda x: (F.unfold(x, 2), F.fold(F.unfold(x, 2, stride=2), (6, 6), 2, stride=2)), IMAGE),
    "padding": (
        lambda x: (F.pad(x, (1, 1, 1, 1), "replicate"), F.pad(x[0], (2, 1), "reflect"), F.pad(x[0], (2, 1), "replicate")), IMAGE),
    "pooling": (lambda x: (F.adaptive_max_pool2d(x, 2), F.max_pool3d(x, 2), F.avg_pool3d(x, 2), F.adaptive_avg_pool3d(x, 2)), IMAGE),
    "attention without a fused kernel": (lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]), *QKV),
    "attention by parts": (math_attention, *QKV),
    "causal attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *QKV),
    "grouped attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True, is_causal=True), *QKV),
    "a number of a tensor": (lambda x: x * x.sum().item(), X),
    "nested result": (lambda x: {"a": x + 1, "b": {"c": [x * 2, (x, 3, None, "text")]}}, X),
    "aliases": (lambda x: (x, x.view(-1), x.t(), x[1:]), X),
    "strided inputs": (lambda a, b, c: (a + 1, b.reshape(-1), c * 2), SQUARE.t(), SQUARE[:, ::2], X[:1].expand(3, 4)),
    "0-d": (lambda x, y: (x + y, x.view(1), x.expand(3), torch.stack([x, x])), torch.tensor(2.0), torch.tensor(3)),
    "empty": (lambda x: (x + 1, x.sum(0), torch.cat([x, torch.ones(2, 4)]), x.view(4, 0)), torch.empty(0, 4)),
    "loss": (lambda x, t: F.cross_entropy(x, t), X, torch.tensor([0, 3, 1])),
}  # fmt: skip

# torch takes these apart while it traces: equal up to the last bits.
NEARLY = {
    "grid_sample": (lambda x, grid: F.grid_sample(x, grid, align_corners=False), IMAGE, normal(2, 5, 5, 2)),
    "affine_grid": (lambda theta: F.affine_grid(theta, (2, 4, 4, 4), align_corners=False), normal(2, 2, 3)),
    "interpolate": (lambda x: tuple(F.interpolate(x, scale_factor=2, mode=m) for m in ("nearest", "bilinear", "area")), IMAGE),
    "interpolate without aliasing": (lambda x: F.interpolate(x, size=(4, 5), mode="bilinear", antialias=True), IMAGE),
    "losses": (lambda x: (F.mse_loss(x, x * 2), F.smooth_l1_loss(x, x * 2), F.binary_cross_entropy_with_logits(x, x.sigmoid())), X),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_Happy_operators_equal_eager(daemon, name):
    function, *arguments = FUNCTIONS[name]
    check(Case(function, [(tuple(arguments), {})]))


@pytest.mark.parametrize("name", NEARLY)
def test_Happy_operators_that_torch_takes_apart_equal_eager_nearly(daemon, name):
    function, *arguments = NEARLY[name]
    check(Case(function, [(tuple(arguments), {})], exact=False))


MODULES = {
    "LayerNorm": (lambda: layers(lambda: nn.LayerNorm(4)), X),
    "GroupNorm": (lambda: layers(lambda: nn.GroupNorm(2, 4)), IMAGE),
    "LSTMCell": (lambda: layers(lambda: nn.LSTMCell(4, 8)), X),
    "GRUCell": (lambda: layers(lambda: nn.GRUCell(4, 8)), X),
    "Conv3d": (lambda: layers(lambda: nn.Conv3d(2, 3, 3, padding=1), lambda: nn.BatchNorm3d(3), lambda: nn.MaxPool3d(2)),
               IMAGE.view(2, 2, 2, 6, 6)),
    "EmbeddingBag": (lambda: layers(lambda: nn.EmbeddingBag(4, 8)), ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_Happy_modules_equal_eager(daemon, name):
    make, argument = MODULES[name]
    check(Case(make(), [((argument,), {})]))


@pytest.mark.parametrize(
    "make", [lambda: nn.InstanceNorm2d(4, affine=True), lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 2, 1))]
)
def test_Happy_norms_that_torch_takes_apart_equal_eager_nearly(daemon, make):
    check(Case(layers(make), [((IMAGE,), {})], exact=False))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_Happy_recurrent_layers_equal_eager_once_dynamo_takes_them(daemon, kind):
    torch.manual_seed(0)
    module = kind(8, 8, 2, batch_first=True).eval()
    with torch._dynamo.config.patch(allow_rnn=True):
        check(Case(module, [((normal(2, 5, 8),), {})]))


def test_Happy_encoder_layers_equal_eager_without_their_fast_path(daemon):
    module = layers(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    argument = normal(2, 5, 4)
    with torch.inference_mode(), pytest.raises(slicescheduler.UnsupportedOperatorError, match="set_fastpath_enabled"):
        torch.compile(module, backend="slicescheduler", fullgraph=True)(argument)
    torch._dynamo.reset()
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        check(Case(module, [((argument,), {})]))
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def test_Happy_dynamic_batches_share_one_graph(daemon):
    check(Case(conv_net(), [((normal(n, 4, 8, 8),), {}) for n in (2, 3, 5)], {0: (0,)}))


def test_Happy_dynamic_lengths_and_arithmetic_on_them_share_one_graph(daemon):
    def function(x):
        return x.sum(1) / x.shape[1], x / x.shape[1] ** 0.5, x + torch.arange(x.shape[1]), F.pad(x, (0, 9 - x.shape[1]))

    check(Case(function, [((normal(n, m),), {}) for n, m in ((2, 3), (5, 7), (3, 2))], {0: (0, 1)}))


def test_Happy_numbers_that_change_between_calls_share_one_graph(daemon):
    calls = [((X, number), {}) for number in (0.7, 0.8, 0.9)]
    check(Case(lambda x, t: x / t, calls, graphs=2))  # the first call's number is taken for a constant


# ---- refused, by the operator's name and with advice --------------------------------------------

REFUSED = {
    "random": (lambda x: x + torch.rand(4), "aten::rand.*draw random numbers outside"),
    "multinomial": (lambda x: torch.multinomial(x.softmax(-1), 1), "aten::multinomial.*draw random numbers outside"),
    "gumbel": (F.gumbel_softmax, "aten::exponential.*draw random numbers outside"),
    "nonzero": (torch.nonzero, "aten::nonzero.*mask"),
    "loop over experts": (lambda x: x[torch.where(x[:, 0] > 0)[0]], "aten::nonzero.*experts_implementation"),
    "unique": (torch.unique, "aten::_unique2.*mask"),
    "boolean index": (lambda x: x[x > 0], r"aten::index.Tensor.*test_runtime_operators.py.*depends on data.*torch.where"),
    "repeats": (lambda x: x.repeat_interleave(torch.tensor([1, 2, 3]), 0), "aten::repeat_interleave.Tensor.*integer number"),
    "cond": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "cond.*torch.where"),
    "irfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x)), "aten::_fft_c2r.*torch.fft.ifft"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_Malicious_refusals_name_the_operator_and_say_what_to_do(name):
    function, text = REFUSED[name]
    step = torch.compile(function, backend="slicescheduler", fullgraph=True)
    with torch.inference_mode(), pytest.raises(slicescheduler.SliceError, match=text):
        step(X)
