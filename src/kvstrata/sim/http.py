"""Calls between the proxy and the engines: reliable while the engine lives, an error when it does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstrata.sim.setting import Setting
from kvstrata.sim.world import Action


@dataclass(slots=True, eq=False)
class Call:
    """One call that the proxy has open. `on_answer(call, value)` or `on_error(call)`, once."""

    number: int
    on_answer: Callable[[Call, Any], None]
    on_error: Callable[[Call], None]
    is_over: bool = False


class Server:
    """The process of an engine that answers calls."""

    def __init__(self, setting: Setting, name: str) -> None:
        self.setting = setting
        self.name = name
        self.process = setting.process(f"{name}-core")
        self._calls: dict[int, Call] = {}

    def post(self, call: Call, action: Action, *args: Any) -> None:
        """The proxy begins a call: run `action(call, *args)` in the engine."""
        self.setting.world.at(self._delay_s(), self._arrive, call, action, args)

    def post_cancel(self, call: Call) -> None:
        """The proxy hangs up."""
        call.is_over = True
        self.setting.world.at(self._delay_s(), self._hang_up, call)

    def answer(self, call: Call, value: Any) -> None:
        """The engine ends a call; nothing if the proxy hung up."""
        if self._calls.pop(call.number, None) is not None:
            self.setting.world.at(self._delay_s(), self._deliver, call, value)

    def forget(self, call: Call) -> None:
        """The engine has noticed that the caller hung up."""
        self._calls.pop(call.number, None)

    def cancel(self, call: Call) -> None:
        """The caller hung up. The engine's business."""
        raise NotImplementedError

    def break_calls(self) -> None:
        """The engine crashes: every open call ends in an error."""
        for call in self._calls.values():
            self.setting.world.at(self._delay_s(), self._fail, call)
        self._calls.clear()

    def _arrive(self, call: Call, action: Action, args: tuple[Any, ...]) -> None:
        if not self.process.is_up:
            self.setting.world.at(self._delay_s(), self._fail, call)
            return
        if call.is_over:
            return  # hung up before it was read
        self._calls[call.number] = call
        self.process.hear(action, call, *args)

    def _hang_up(self, call: Call) -> None:
        if self.process.is_up:
            self.process.hear(self.cancel, call)

    def _deliver(self, call: Call, value: Any) -> None:
        if not call.is_over:
            call.is_over = True
            call.on_answer(call, value)

    def _fail(self, call: Call) -> None:
        if not call.is_over:
            call.is_over = True
            call.on_error(call)

    def _delay_s(self) -> float:
        return self.setting.options.network_s * (0.1 + self.setting.world.random.random())
