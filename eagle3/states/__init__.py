"""Hidden states: the engine that makes them, the connector that carries them, the shards that hold them."""
