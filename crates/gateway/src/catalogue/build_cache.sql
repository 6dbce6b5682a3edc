-- What steps of builds led to, by what they depend on. Made where it is missing: older files have it not.
CREATE TABLE IF NOT EXISTS build_cache (
  project_id TEXT NOT NULL REFERENCES projects (id),
  key        TEXT NOT NULL,
  layers     TEXT NOT NULL,
  used_at    INTEGER NOT NULL,
  PRIMARY KEY (project_id, key)
) STRICT;
CREATE INDEX IF NOT EXISTS build_cache_by_use ON build_cache (project_id, used_at);
CREATE TABLE IF NOT EXISTS build_cache_layers (
  project_id TEXT NOT NULL,
  digest     TEXT NOT NULL,
  key        TEXT NOT NULL,
  PRIMARY KEY (project_id, digest, key),
  FOREIGN KEY (project_id, key) REFERENCES build_cache (project_id, key) ON DELETE CASCADE
) STRICT;
