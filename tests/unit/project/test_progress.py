"""A phase says how fast it goes and how long it will still take, once it can know."""

from graftwork.project.reporter import NullReporter, progress_listener


class Listening(NullReporter):
    def __init__(self):
        self.heard = []

    def progress(self, phase, done, total, *, seconds_left, detail):
        self.heard.append((phase, done, total, seconds_left, detail))


def test_the_rate_and_the_time_left_come_when_enough_was_seen():
    listener, seconds = Listening(), [0.0]
    report = progress_listener(listener, clock=lambda: seconds[0])
    report("render", 0, 1000)
    seconds[0] = 1.0
    report("render", 50, 1000)
    seconds[0] = 4.0
    report("render", 200, 1000)
    assert listener.heard == [
        ("render", 0, 1000, None, {}),
        ("render", 50, 1000, None, {}),
        ("render", 200, 1000, 16.0, {"rows/s": 50.0}),
    ]


def test_bytes_read_are_shown_in_mebibytes():
    listener, seconds = Listening(), [0.0]
    report = progress_listener(listener, clock=lambda: seconds[0])
    report("read and sift", 0, 8 << 20)
    seconds[0] = 2.0
    report("read and sift", 4 << 20, 8 << 20)
    assert listener.heard[-1] == ("read and sift", 4.0, 8.0, 2.0, {"MiB/s": 2.0})
