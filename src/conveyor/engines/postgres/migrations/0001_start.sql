-- SPEC §5 describes every table. A change is a new file with the next number, and a change of SPEC §5.
-- A migration that changes `tasks`, `ends` or `events` changes the tables of large runs too: see own_tables in tasks.sql.

CREATE TABLE jobs (
    job_id text COLLATE "C" PRIMARY KEY,
    tenant text NOT NULL,
    name text,
    kind text NOT NULL,
    mode text NOT NULL,
    options text NOT NULL,
    task_shard_count integer NOT NULL,
    result_layout text NOT NULL,
    state text NOT NULL,
    reason text,
    created_at double precision NOT NULL,
    expires_at double precision NOT NULL,
    run_id text NOT NULL,
    -- JSON; NULL for a job whose tasks came in the request, and for an open one.
    source text,
    -- The key of the source: JSON of any content can not be asked for a field here (a \u0000 is refused).
    source_key text,
    deleted boolean NOT NULL DEFAULT false,
    version integer NOT NULL
) WITH (fillfactor = 80);
CREATE INDEX jobs_by_tenant ON jobs (tenant, job_id);
CREATE INDEX jobs_expiring ON jobs (expires_at);
CREATE INDEX jobs_active ON jobs (job_id) WHERE state IN ('ingesting', 'running', 'paused');

CREATE TABLE runs (
    run_id text PRIMARY KEY,
    job_id text NOT NULL,
    number integer NOT NULL,
    state text NOT NULL,
    total bigint NOT NULL,
    last_batch boolean NOT NULL,
    created_at double precision NOT NULL,
    ended_at double precision,
    sealed boolean NOT NULL,
    invalid bigint NOT NULL,
    -- The index of the next range of an open job.
    next_index bigint NOT NULL DEFAULT 0,
    touched_at double precision NOT NULL,
    lineage text,
    -- Whether an ended run has no pending tasks and no queue any more.
    swept boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);
CREATE INDEX runs_by_job ON runs (job_id, number);
CREATE INDEX runs_unswept ON runs (ended_at) WHERE ended_at IS NOT NULL AND NOT swept;

-- A job with each of its runs.
CREATE VIEW runs_shown AS
SELECT j.tenant, j.job_id, j.name, j.kind, j.mode, j.options, j.task_shard_count, j.result_layout, j.state, j.reason,
    j.created_at, j.expires_at, j.source, j.version, r.run_id, r.number, r.state AS run_state, r.total, r.last_batch,
    r.created_at AS run_created_at, r.ended_at, r.sealed, r.invalid, r.touched_at, r.lineage, r.swept, j.deleted,
    j.run_id AS latest
FROM jobs AS j JOIN runs AS r USING (job_id);

-- A job as it is read: with its latest run.
CREATE VIEW jobs_shown AS SELECT * FROM runs_shown WHERE run_id = latest;

CREATE TABLE ranges (
    run_id text NOT NULL,
    number integer NOT NULL,
    -- What does not change of it, as JSON; of that, where it begins and ends in bytes, as far as known.
    plan text NOT NULL,
    first_byte bigint NOT NULL,
    end_byte bigint,
    next_index bigint NOT NULL,
    byte_offset bigint NOT NULL,
    tasks bigint NOT NULL DEFAULT 0,
    invalid bigint NOT NULL DEFAULT 0,
    done boolean NOT NULL DEFAULT false,
    -- Fence of the lease under which it was last written.
    fence bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, number)
) WITH (fillfactor = 70);

CREATE TABLE uploads (
    upload_id text PRIMARY KEY,
    tenant text NOT NULL,
    key text NOT NULL,
    size bigint NOT NULL,
    sha256 text NOT NULL,
    created_at double precision NOT NULL,
    expires_at double precision NOT NULL,
    stored_at double precision
);
CREATE INDEX uploads_expiring ON uploads (expires_at);

CREATE TABLE notices (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    notice_id text NOT NULL UNIQUE,
    tenant text NOT NULL,
    job_id text NOT NULL,
    run_id text NOT NULL,
    event text NOT NULL,
    at double precision NOT NULL,
    data text NOT NULL,
    told boolean NOT NULL DEFAULT false
);
CREATE INDEX notices_by_job ON notices (tenant, job_id, seq);
CREATE INDEX notices_untold ON notices (seq) WHERE NOT told;

-- Documents of many kinds, each written on its version.
CREATE TABLE rows (
    kind text NOT NULL,
    tenant text NOT NULL,
    id text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    version integer NOT NULL,
    due_at double precision,
    expires_at double precision,
    job_id text,
    PRIMARY KEY (kind, tenant, id)
);
CREATE INDEX rows_due ON rows (kind, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX rows_by_job ON rows (job_id, kind, tenant, id) WHERE job_id IS NOT NULL;
CREATE INDEX rows_expiring ON rows (expires_at) WHERE expires_at IS NOT NULL AND due_at IS NULL;

CREATE TABLE idempotency (
    tenant text NOT NULL,
    route text NOT NULL,
    key text NOT NULL,
    fingerprint text NOT NULL,
    subject text NOT NULL,
    lease_until double precision NOT NULL,
    status integer NOT NULL,
    body bytea NOT NULL,
    expires_at double precision NOT NULL,
    PRIMARY KEY (tenant, route, key)
);
CREATE INDEX idempotency_expiring ON idempotency (expires_at);

CREATE TABLE keys (
    key_id text PRIMARY KEY,
    tenant text NOT NULL,
    name text,
    secret_sha256 text NOT NULL,
    created_at double precision NOT NULL,
    revoked_at double precision,
    expires_at double precision,
    admin boolean NOT NULL
);

-- The small number under which the tasks of a run stand, and whether it has tables of its own (tables.py).
CREATE TABLE task_runs (
    run_no integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id text NOT NULL,
    tenant text NOT NULL,
    own boolean NOT NULL DEFAULT false,
    UNIQUE (run_id, tenant)
);

-- The kept counts, spread over slots so that those who finish tasks of one run seldom wait for each other. A reader
-- adds them up.
CREATE TABLE task_counts (
    run_no integer NOT NULL,
    slot smallint NOT NULL,
    succeeded bigint NOT NULL,
    failed bigint NOT NULL,
    cancelled bigint NOT NULL,
    PRIMARY KEY (run_no, slot)
) WITH (fillfactor = 50);

CREATE TABLE task_errors (
    run_no integer NOT NULL,
    error_code text COLLATE "C" NOT NULL,
    slot smallint NOT NULL,
    count bigint NOT NULL,
    PRIMARY KEY (run_no, error_code, slot)
) WITH (fillfactor = 70);

-- Tasks as they came; never updated. sort_key is the first 60 bits of the task_id, whose order the listing follows; the
-- task_id itself is made from the run and the index.
CREATE TABLE tasks (
    idx bigint NOT NULL,
    sort_key bigint NOT NULL,
    run_no integer NOT NULL,
    shard smallint NOT NULL,
    -- The user's own, from the input.
    tag text,
    input text NOT NULL,
    PRIMARY KEY (run_no, idx)
);
CREATE INDEX tasks_by_id ON tasks (run_no, shard, sort_key, idx);

-- How tasks ended, a row each; never updated either. A task without one is pending. That an end is an insert and not an
-- update leaves no dead rows behind and no index of the task to be written again.
CREATE TABLE ends (
    idx bigint NOT NULL,
    sort_key bigint NOT NULL,
    finished_at double precision,
    run_no integer NOT NULL,
    attempts integer NOT NULL,
    http_status integer,
    shard smallint NOT NULL,
    status smallint NOT NULL,
    error_code text,
    detail text,
    PRIMARY KEY (run_no, idx)
);
CREATE INDEX ends_failed ON ends (run_no, shard, sort_key, idx) WHERE status = 2;

CREATE SEQUENCE event_seq;
CREATE TABLE events (
    seq bigint PRIMARY KEY DEFAULT nextval('event_seq'),
    run_no integer NOT NULL,
    idx bigint NOT NULL,
    at double precision NOT NULL,
    event text NOT NULL,
    data text NOT NULL
);
CREATE INDEX events_by_run ON events (run_no, seq);
CREATE INDEX events_by_task ON events (run_no, idx, seq);

CREATE TABLE messages (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    visible_at double precision NOT NULL,
    receives integer NOT NULL DEFAULT 0,
    -- Deliveries on which work had begun, and whether it has on the present one.
    starts integer NOT NULL DEFAULT 0,
    started boolean NOT NULL DEFAULT false,
    queue text NOT NULL,
    -- Of the delivery that holds it, and part of its receipt; NULL when it was never taken, or was given back.
    delivery text,
    body bytea NOT NULL
) WITH (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0
);
-- Out of the row where it is large, and not compressed: taking a message then writes a small row.
ALTER TABLE messages ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE INDEX messages_due ON messages (queue, visible_at, id);

CREATE TABLE dead_letters (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue text NOT NULL,
    body bytea NOT NULL,
    reason text NOT NULL,
    at double precision NOT NULL
);
