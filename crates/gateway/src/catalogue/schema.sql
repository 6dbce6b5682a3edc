CREATE TABLE projects (
  id         TEXT PRIMARY KEY,
  created_at TEXT NOT NULL
) STRICT;
INSERT INTO projects VALUES ('default', strftime('%Y-%m-%dT%H:%M:%fZ', 'now'));

CREATE TABLE keys (
  id         TEXT PRIMARY KEY,
  project_id TEXT NOT NULL REFERENCES projects (id),
  name       TEXT NOT NULL,
  sha256     BLOB NOT NULL UNIQUE,
  created_at TEXT NOT NULL
) STRICT;

CREATE TABLE images (
  project_id TEXT NOT NULL REFERENCES projects (id),
  name       TEXT NOT NULL,
  digest     TEXT NOT NULL,
  record     TEXT NOT NULL,
  created_at TEXT NOT NULL,
  PRIMARY KEY (project_id, name)
) STRICT;
CREATE INDEX images_by_digest ON images (project_id, digest);

CREATE TABLE layers (
  project_id TEXT NOT NULL REFERENCES projects (id),
  digest     TEXT NOT NULL,
  record     TEXT NOT NULL,
  created_at TEXT NOT NULL,
  PRIMARY KEY (project_id, digest)
) STRICT;

CREATE TABLE image_layers (
  project_id TEXT NOT NULL,
  image      TEXT NOT NULL,
  digest     TEXT NOT NULL,
  PRIMARY KEY (project_id, digest, image),
  FOREIGN KEY (project_id, image) REFERENCES images (project_id, name) ON DELETE CASCADE
) STRICT;

CREATE TABLE environments (
  project_id TEXT NOT NULL REFERENCES projects (id),
  name       TEXT NOT NULL,
  base       TEXT NOT NULL,
  record     TEXT NOT NULL,
  PRIMARY KEY (project_id, name)
) STRICT;
CREATE INDEX environments_by_base ON environments (project_id, base);

CREATE TABLE environment_layers (
  project_id  TEXT NOT NULL,
  environment TEXT NOT NULL,
  digest      TEXT NOT NULL,
  PRIMARY KEY (project_id, digest, environment),
  FOREIGN KEY (project_id, environment) REFERENCES environments (project_id, name) ON DELETE CASCADE
) STRICT;
