"""What the driver writes about itself is read as it is written."""

from graftwork.model.probe import name_device, read_driver, read_facts, read_model
from graftwork.model.shape import joined_sizes
from graftwork.records.plan import ModelShape

INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 42
GPU UUID: \t GPU-0
"""
VERSION = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build
GCC version:  gcc version 12.2.0
"""


def test_the_cards_name_and_driver_are_read():
    assert read_model(INFORMATION) == "NVIDIA H200"
    assert read_driver(VERSION) == "580.95.05"
    assert read_model("") == read_driver("") == ""


def test_measured_facts_are_read_among_warnings():
    printed = 'UserWarning: old driver\n{"kind": "cuda", "gflops": 7.0}\n3\nleaked semaphore objects: {1}\n'
    assert read_facts(printed) == {"kind": "cuda", "gflops": 7.0}
    assert read_facts("nothing\n") is None


def test_a_hidden_card_leaves_the_processor(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    device = name_device()
    assert device.kind == "cpu"
    assert device.name
    assert device.driver == ""


def test_products_are_joined_as_our_step_does_them():
    shape = ModelShape(
        name="seven",
        hidden_size=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate_size=18944,
        vocab_size=152_064,
        tied_embeddings=False,
        max_positions=32_768,
    )
    assert joined_sizes(shape) == {
        "qkv": (3584, 3584 + 2 * 512),
        "gate_up": (3584, 2 * 18944),
        "o_proj": (3584, 3584),
        "down_proj": (18944, 3584),
    }
