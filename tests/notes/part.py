"""A scribe's work beside consensus."""

from __future__ import annotations

from dataclasses import dataclass

from features.services import ServiceContext
from ledger.members import MembersState
from tests.notes.module import NotesState, Write


@dataclass
class Scribe:
    desk: ServiceContext

    async def run(self) -> None:
        """Write the first note as soon as the network knows the role, and report its decision."""
        while "scribe" not in self.desk.state.module_state(MembersState).members[self.desk.me].roles:
            await self.desk.wait_for_block_above(self.desk.height)
        digest = self.desk.add_blob(str(self.desk.get_setting("first_note")).encode())
        await self.desk.submit_transaction("notes/write", Write(digest))
        assert self.desk.state.module_state(NotesState).written[self.desk.me] == 1
        (self.desk.folder / "written").touch()
        self.desk.log_event("the first note is decided")
