"""The contract of the tiered store, inherited by each back end."""

from __future__ import annotations

from store_contract_bytes import BytesContract
from store_contract_copies import CopyContract
from store_contract_figures import FiguresContract
from store_contract_leases import LeaseContract


class StoreContract(BytesContract, LeaseContract, CopyContract, FiguresContract):
    """What every back end promises. A subclass says where blocks live and which device stands for the GPU."""
