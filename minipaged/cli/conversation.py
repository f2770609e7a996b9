"""A conversation with a model: its messages, their tokens, and how many of these are in the prefix cache.

    turn 1   system, question                              computed
    turn 2   system, question, answer, question            all full blocks up to the answer's end are reused

The prompt of a turn begins with exactly the tokens of the turn before, including the generated ones. Encoding
the text of the answer again could give other tokens, and nothing after the first difference could be reused.
Where the chat template drops the thoughts of an earlier answer, what follows them is computed again.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from minipaged.decoding.params import SamplingParams
from minipaged.decoding.reasoning import ReasoningTags
from minipaged.prompts import RequestError
from minipaged.scheduling import RequestTooLongError
from minipaged.viewer.snapshot import TableView

if TYPE_CHECKING:
    from minipaged.llm import LLM
    from minipaged.scheduling import Request

PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}User: {{ message.content }}\n"
    "{% elif message.role == 'assistant' %}Assistant:{{ message.content }}\n"
    "{% else %}{{ message.content }}\n\n{% endif %}"
    "{% endfor %}Assistant:"
)
"""For models without a chat template."""

PLAIN_STOP = ("\nUser:",)
"""Where an answer in that template ends."""


PROBE = "quokka"
"""A word that no template has of its own."""


class Turn(NamedTuple):
    """What an answer cost."""

    num_prompt_tokens: int
    num_reused: int  # of the prompt, found in the prefix cache
    num_tokens: int  # of the answer
    tokens_per_second: float | None
    finish_reason: str | None  # None: it was stopped
    num_accepted: int  # draft tokens
    num_drafted: int


class Conversation:
    """Messages and the model that answers them.

    Args:
        llm: has a tokenizer; without a chat template, `PLAIN_TEMPLATE` is used.
        params: of every answer.
        system: the first message, if any.
        chat_template_kwargs: further variables for the template.

    Raises:
        RequestError: the model has no tokenizer.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if llm.tokenizer is None:
            raise RequestError(
                "the model has no tokenizer that can be read, so it cannot chat; see the warning, or give "
                "another model"
            )
        shown, left_out = (ReasoningTags.of(llm.tokenizer, skip) for skip in (False, True))
        if shown and not left_out:  # without them, a template cannot tell thoughts from the answer
            params = params.clone(skip_special_tokens=False)
        self.llm = llm
        self.params = params
        self.last: Turn | None = None
        self._prompt = partial(llm.chat_prompt, chat_template_kwargs=chat_template_kwargs)
        self._beginning = [{"role": "system", "content": system}] if system else []
        self._request: Request | None = None
        self._drafts_before = (0, 0)  # accepted, drafted
        llm.engine.on_committed.append(self._watch)
        self.reset()

    def reset(self) -> None:
        """Start again with only the system message."""
        self.messages = list(self._beginning)
        self.token_ids: list[int] = []  # of the last prompt and, unless it was stopped, its answer

    def ask(self, text: str) -> Generator[str]:
        """Yield the answer piece by piece. If the iterator is left early, the answer so far is kept.

        Raises:
            ValueError: the message cannot be answered; the conversation is as before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt_ids = self._encode(messages)
        answer, finished = "", False
        self._request = self.last = None
        self._drafts_before = self._drafts()
        try:
            for piece in self.llm.stream({"prompt_token_ids": prompt_ids}, self.params):
                answer += piece
                yield piece
            finished = True
        finally:
            if answer or finished:
                self.messages = [*messages, {"role": "assistant", "content": answer}]
                self.token_ids = prompt_ids
                self._note(answer)

    def check_template(self) -> None:
        """Raise `RequestError` if the chat template has a mistake, or leaves the user's message out.

        Which messages it rejects is reported when they come.
        """
        from jinja2 import TemplateSyntaxError

        try:
            text = self._prompt([*self._beginning, {"role": "user", "content": PROBE}])["prompt"]
        except RequestError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                raise
        else:
            if PROBE not in text.lower():
                raise RequestError(
                    "the chat template leaves out what the user says; give one that writes the content of "
                    "each message"
                )

    @property
    def room(self) -> int:
        """The most tokens of a conversation: the model's context, or fewer where the pool is smaller."""
        kv = self.llm.engine.scheduler.kv
        return min(self.llm.engine.executor.max_model_len, kv.allocator.num_blocks * kv.block_size)

    def fits_alone(self, text: str) -> bool:
        """Whether a question could be asked after `reset`."""
        prompt = self._prompt([*self._beginning, {"role": "user", "content": text}])
        try:
            self.llm.engine.make_request("", *self.llm.tokenize(prompt, self.params))
        except RequestTooLongError:
            return False
        return True

    def _watch(self, plan: object, result: object, touched: list[Request]) -> None:
        self._request = touched[0] if touched else self._request

    def _drafts(self) -> tuple[int, int]:
        metrics = self.llm.engine.metrics
        return metrics.accepted_tokens, metrics.draft_tokens

    def _note(self, answer: str) -> None:
        """Record what the answer cost, and its tokens if they spell what was shown."""
        if self._request is None:
            return
        output = self.llm.engine.output(self._request)
        [completion] = output.outputs
        self.last = Turn(
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            len(completion.token_ids),
            None if output.metrics is None else output.metrics.tokens_per_second,
            completion.finish_reason if completion.finish_reason in ("stop", "length") else None,
            *(now - before for now, before in zip(self._drafts(), self._drafts_before)),
        )
        answered = completion.token_ids
        if answered and completion.finish_reason == "stop" and not completion.stop_reason:
            answered = answered[:-1]  # EOS: the template adds its own
        if self._decode(answered) == answer:
            self.token_ids = self.token_ids + answered

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation, beginning with the last turn's wherever the text allows."""
        prompt = self._prompt(messages)
        token_ids: list[int] = list(prompt["prompt_token_ids"])
        text, before = self._decode(token_ids), self._decode(self.token_ids)
        if not self.token_ids or not text.startswith(before):
            return token_ids
        rest = self.llm.tokenizer.encode(text[len(before) :], add_special_tokens=False)
        joined = self.token_ids + rest
        return joined if self._decode(joined) == text else token_ids

    def _decode(self, token_ids: list[int]) -> str:
        return self.llm.tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def kept(self) -> TableView | None:
        """The blocks of this conversation that the prefix cache has; None if prefix caching is off."""
        cache = self.llm.engine.scheduler.kv.prefix_cache
        if cache is None:
            return None
        token_ids, hashes = array("i", self.token_ids), list[int]()
        cache.extend_hashes(hashes, token_ids)
        blocks = cache.match(hashes, token_ids)
        num_tokens = len(blocks) * cache.block_size
        return TableView(
            "chat",
            position=0,
            blocks=tuple(blocks),
            num_tokens=num_tokens,
            num_computed=num_tokens,
            token_ids=tuple(token_ids[:num_tokens]),
        )
