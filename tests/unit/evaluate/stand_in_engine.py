"""An inference engine without a model: a prompt is its bytes, an answer what a function makes of it."""

from graftwork.engines.interface import EngineFacts, EngineReply, RenderedPrompt, Timing


class StandInEngine:
    adapters = ()
    facts = EngineFacts("stand-in", "float32", "", {"engine": "stand-in"})

    def __init__(self, *, fail_at_batch=None, tokens_told=0, timings=None):
        self.batches, self.asked, self.seeds = [], [], []
        self.fail_at_batch, self.tokens_told = fail_at_batch, tokens_told
        self._timings = None if timings is None else iter(timings)

    def render(self, messages):
        return RenderedPrompt(messages, list("\n".join(m.content for m in messages).encode()))

    def answer(self, prompts, decoding, *, adapter=None, on_token=None):
        self.batches.append(len(prompts))
        self.asked.append([prompt.tokens for prompt in prompts])
        if len(self.batches) == self.fail_at_batch:
            raise RuntimeError("killed")
        for _ in range(self.tokens_told):
            assert all(on_token(row, 65) for row in range(len(prompts)))
        if decoding.temperature > 0:
            self.seeds.append(decoding.seed)
        return [self._reply(prompt, decoding) for prompt in prompts]

    def _reply(self, prompt, decoding):
        text = str(decoding.seed if decoding.temperature > 0 else len(prompt.tokens))
        return EngineReply(text, len(text), len(prompt.tokens), "stop")

    def time_one(self, _prompt, _decoding, *, adapter=None):
        return Timing(0.1, 0.2) if self._timings is None else Timing(None, next(self._timings))

    def reply_losses(self, conversations, *, adapter=None):
        return [float(len(reply)) for _, reply in conversations]

    def load_adapter(self, name, folder): ...

    def peak_memory_gib(self):
        return 0.5

    def close(self): ...
