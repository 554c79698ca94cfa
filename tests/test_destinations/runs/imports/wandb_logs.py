"""Writes logs as W&B does: its records in LevelDB's log format with CRC-32."""

import json
import struct
import zlib

__all__ = ["artifact", "history", "log_bytes", "metric"]

BLOCK, HEADER = 1 << 15, 7


def log_bytes(records):
    """Returns a log with these records, given as bytes."""
    log = bytearray(b":W&B\xe1\xbe\0")
    for record in records:
        at = 0
        while not at or at < len(record):
            left = BLOCK - len(log) % BLOCK
            if left < HEADER:
                log += bytes(left)
                continue
            part = record[at : at + left - HEADER]
            is_first, is_last = not at, at + len(part) == len(record)
            at += len(part)
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[is_first, is_last]
            log += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
    return bytes(log)


def history(**values):
    """Returns the record of a call of `log`."""
    from wandb.proto.wandb_internal_pb2 import HistoryRecord, Record

    row = HistoryRecord()
    for name, value in values.items():
        row.item.add(nested_key=[name], value_json=json.dumps(value))
    return Record(history=row).SerializeToString()


def metric(**fields):
    """Returns the record of a call of `define_metric`."""
    from wandb.proto.wandb_internal_pb2 import MetricRecord, Record

    return Record(metric=MetricRecord(**fields)).SerializeToString()


def artifact(**entry):
    """Returns the record of a table's artifact with one file."""
    from wandb.proto.wandb_internal_pb2 import ArtifactRecord, Record

    found = ArtifactRecord(type="run_table")
    found.manifest.contents.add(**entry)
    return Record(artifact=found).SerializeToString()
