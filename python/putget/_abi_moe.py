"""The structures of putget_moe.h."""

from __future__ import annotations

from ctypes import c_int32, c_uint32, c_uint64, c_void_p

from putget._abi import MAX_PAYLOADS, Checked, Versioned


class MoeConfig(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("ep_size", c_uint32),
        ("ep_rank", c_uint32),
        ("num_experts", c_uint32),
        ("num_local_experts", c_uint32),
        ("top_k", c_uint32),
        ("max_rows", c_uint32),
        ("alignment", c_uint32),
        ("num_payloads", c_uint32),
        ("row_bytes", c_uint32 * MAX_PAYLOADS),
    )


class MoeLayout(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("payload", c_uint64 * MAX_PAYLOADS),
        ("offsets", c_uint64),
        ("num_rows", c_uint64),
        ("weights", c_uint64),
        ("source_rows", c_uint64),
        ("positions", c_uint64),
        ("total_bytes", c_uint64),
        ("capacity", c_uint32),
        ("reserved", c_uint32),
    )


class MoeGroupArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("memory", c_void_p),
        ("topk_ids", c_void_p),
        ("topk_weights", c_void_p),
        ("num_tokens", c_void_p),
        ("expert_to_rank", c_void_p),
        ("lost_rows", c_void_p),
        ("payload", c_void_p * MAX_PAYLOADS),
        ("stream", c_void_p),
        ("stray_rows", c_void_p),
        ("leave_rows", c_uint32),
        ("expected_rows", c_uint32),
    )


class MoeFinalizeArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("rows", c_void_p),
        ("out", c_void_p),
        ("elements", c_uint32),
        ("element_type", c_uint32),
    )


class MoeRows(Checked):
    _fields_ = (
        ("count", c_void_p),
        ("offsets", c_void_p),
        ("num_rows", c_void_p),
        ("num_groups", c_uint32),
        ("limit", c_uint32),
    )


class MoeExpandArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("valid", MoeRows),
        ("source_rows", c_void_p),
        ("num_source_rows", c_uint32),
        ("num_payloads", c_uint32),
        ("from_rows", c_void_p * MAX_PAYLOADS),
        ("to_rows", c_void_p * MAX_PAYLOADS),
        ("row_bytes", c_uint32 * MAX_PAYLOADS),
        ("stream", c_void_p),
    )


class MoeBySourceArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("num_tokens", c_void_p),
        ("ep_size", c_uint32),
        ("max_rows", c_uint32),
        ("from_order", c_uint32),
        ("to_order", c_uint32),
        ("num_payloads", c_uint32),
        ("filled", c_uint32),
        ("word", c_int32),
        ("from_rows", c_void_p * MAX_PAYLOADS),
        ("to_rows", c_void_p * MAX_PAYLOADS),
        ("row_bytes", c_uint32 * MAX_PAYLOADS),
        ("stream", c_void_p),
    )


class MoeRoutesArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("ids", c_void_p),
        ("in_rank", c_void_p),
        ("per_rank", c_void_p),
        ("per_expert", c_void_p),
        ("num_tokens", c_uint32),
        ("top_k", c_uint32),
        ("ranks", c_uint32),
        ("num_local_experts", c_uint32),
        ("ids_are_64bit", c_uint32),
        ("reserved", c_uint32),
        ("stream", c_void_p),
    )


class MoeCompactArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("num_tokens", c_void_p),
        ("rows", c_void_p),
        ("position", c_void_p),
        ("ends", c_void_p),
        ("lost", c_void_p),
        ("ids", c_void_p),
        ("local", c_void_p),
        ("weights", c_void_p),
        ("local_weights", c_void_p),
        ("per_expert", c_void_p),
        ("ep_size", c_uint32),
        ("max_rows", c_uint32),
        ("count", c_uint32),
        ("top_k", c_uint32),
        ("first_expert", c_uint32),
        ("num_experts", c_uint32),
        ("ids_are_64bit", c_uint32),
        ("num_payloads", c_uint32),
        ("from_rows", c_void_p * MAX_PAYLOADS),
        ("to_rows", c_void_p * MAX_PAYLOADS),
        ("row_bytes", c_uint32 * MAX_PAYLOADS),
        ("stream", c_void_p),
    )


class MoeSendPairsArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("ids", c_void_p),
        ("pairs", c_void_p),
        ("tokens", c_void_p),
        ("num_tokens", c_uint32),
        ("top_k", c_uint32),
        ("ids_are_64bit", c_uint32),
        ("num_payloads", c_uint32),
        ("scale_form", c_uint32),
        ("elements", c_uint32),
        ("from_rows", c_void_p * MAX_PAYLOADS),
        ("to_rows", c_void_p * MAX_PAYLOADS),
        ("row_bytes", c_uint32 * MAX_PAYLOADS),
        ("stream", c_void_p),
    )


class MoePlacePairsArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("ids", c_void_p),
        ("num_tokens", c_void_p),
        ("place", c_void_p),
        ("source_rows", c_void_p),
        ("counts", c_void_p),
        ("added", c_void_p),
        ("ep_size", c_uint32),
        ("max_rows", c_uint32),
        ("first_expert", c_uint32),
        ("num_experts", c_uint32),
        ("capacity", c_uint32),
        ("num_payloads", c_uint32),
        ("from_rows", c_void_p * MAX_PAYLOADS),
        ("to_rows", c_void_p * MAX_PAYLOADS),
        ("row_bytes", c_uint32 * MAX_PAYLOADS),
        ("stream", c_void_p),
    )


class MoeSumPairsArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("pairs", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("rows", c_void_p),
        ("out", c_void_p),
        ("num_tokens", c_uint32),
        ("top_k", c_uint32),
        ("elements", c_uint32),
        ("ids_are_64bit", c_uint32),
        ("stream", c_void_p),
    )


class MoeActivationArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("valid", MoeRows),
        ("x", c_void_p),
        ("out", c_void_p),
        ("scales", c_void_p),
        ("elements", c_uint32),
        ("element_type", c_uint32),
        ("gate", c_uint32),
        ("reserved", c_uint32),
        ("stream", c_void_p),
    )


class MoeProductArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("rows", c_void_p),
        ("row_scales", c_void_p),
        ("weights", c_void_p),
        ("weight_scales", c_void_p),
        ("out", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("num_experts", c_uint32),
        ("capacity", c_uint32),
        ("n", c_uint32),
        ("k", c_uint32),
        ("expected_rows", c_uint32),
        ("num_sms", c_uint32),
        ("out_scales", c_void_p),
        ("gate", c_uint32),
        ("reserved", c_uint32),
        ("stream", c_void_p),
    )


class MoeNetworksArgs(Versioned):
    _fields_ = (
        ("size", c_uint32),
        ("magic", c_uint32),
        ("device", c_uint32),
        ("ordinal", c_int32),
        ("rows", c_void_p),
        ("row_scales", c_void_p),
        ("source_rows", c_void_p),
        ("gate_up", c_void_p),
        ("gate_up_scales", c_void_p),
        ("down", c_void_p),
        ("down_scales", c_void_p),
        ("between", c_void_p),
        ("between_scales", c_void_p),
        ("out", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("progress", c_void_p),
        ("num_experts", c_uint32),
        ("num_rows", c_uint32),
        ("capacity", c_uint32),
        ("hidden_size", c_uint32),
        ("intermediate_size", c_uint32),
        ("num_sms", c_uint32),
        ("gate", c_uint32),
        ("stream", c_void_p),
    )
