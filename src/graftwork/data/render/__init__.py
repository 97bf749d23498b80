"""From kept rows to token shards and dataset folders."""
