-- SPEC §5 describes every table. This is the first version: a change is a new file in migrations/, named in
-- MIGRATIONS (database.py), and a change of SPEC §5.

CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    name TEXT,
    kind TEXT NOT NULL,
    mode TEXT NOT NULL,
    options TEXT NOT NULL,
    task_shard_count INTEGER NOT NULL DEFAULT 1,
    result_layout TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    run_id TEXT NOT NULL,
    -- JSON; NULL for a job whose tasks came in the request, and for an open one.
    source TEXT,
    deleted INTEGER NOT NULL DEFAULT 0,
    -- Goes up with every change of the options.
    version INTEGER NOT NULL DEFAULT 1
) WITHOUT ROWID;
CREATE INDEX jobs_by_tenant ON jobs (tenant, job_id);
CREATE INDEX jobs_expiring ON jobs (expires_at);
CREATE INDEX jobs_active ON jobs (state) WHERE state IN ('ingesting', 'running', 'paused');

CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    job_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    state TEXT NOT NULL,
    total INTEGER NOT NULL,
    last_batch INTEGER NOT NULL,
    created_at REAL NOT NULL,
    ended_at REAL,
    sealed INTEGER NOT NULL,
    invalid INTEGER NOT NULL DEFAULT 0,
    -- The index of the next range of an open job.
    next_index INTEGER NOT NULL DEFAULT 0,
    -- When something was last added to an open job.
    touched_at REAL NOT NULL,
    -- JSON; NULL for the first run of a job.
    lineage TEXT,
    -- 1 once an ended run has no pending tasks and no queue any more.
    swept INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX runs_by_job ON runs (job_id, number);
CREATE INDEX runs_unswept ON runs (ended_at) WHERE ended_at IS NOT NULL AND swept = 0;

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
    run_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    -- What does not change of it, as JSON.
    plan TEXT NOT NULL,
    next_index INTEGER NOT NULL,
    byte_offset INTEGER NOT NULL,
    tasks INTEGER NOT NULL DEFAULT 0,
    invalid INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0,
    -- Fence of the lease under which it was last written.
    fence INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, number)
) WITHOUT ROWID;

CREATE TABLE uploads (
    upload_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    key TEXT NOT NULL,
    size INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    stored_at REAL
) WITHOUT ROWID;
CREATE INDEX uploads_expiring ON uploads (expires_at);

CREATE TABLE notices (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    notice_id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    job_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    event TEXT NOT NULL,
    at REAL NOT NULL,
    data TEXT NOT NULL,
    -- 1 once it was passed on to everyone who waits for it.
    told INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX notices_by_job ON notices (tenant, job_id, seq);
CREATE INDEX notices_untold ON notices (seq) WHERE told = 0;

-- Documents of many kinds, each written on its version.
CREATE TABLE rows (
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    body BLOB NOT NULL,
    version INTEGER NOT NULL,
    due_at REAL,
    expires_at REAL,
    job_id TEXT,
    PRIMARY KEY (kind, tenant, id)
) WITHOUT ROWID;
CREATE INDEX rows_due ON rows (kind, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX rows_by_job ON rows (job_id, kind, tenant, id) WHERE job_id IS NOT NULL;
CREATE INDEX rows_expiring ON rows (expires_at) WHERE expires_at IS NOT NULL AND due_at IS NULL;

CREATE TABLE idempotency (
    tenant TEXT NOT NULL,
    route TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    subject TEXT NOT NULL,
    lease_until REAL NOT NULL,
    status INTEGER NOT NULL,
    body BLOB NOT NULL,
    expires_at REAL NOT NULL,
    PRIMARY KEY (tenant, route, key)
) WITHOUT ROWID;
CREATE INDEX idempotency_expiring ON idempotency (expires_at);

CREATE TABLE keys (
    key_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    name TEXT,
    secret_sha256 TEXT NOT NULL,
    created_at REAL NOT NULL,
    revoked_at REAL,
    expires_at REAL,
    admin INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

-- The kept counts of a run, and the small number under which its tasks stand.
CREATE TABLE task_runs (
    run_no INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    succeeded INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    UNIQUE (run_id, tenant)
);

CREATE TABLE task_errors (
    run_no INTEGER NOT NULL,
    error_code TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (run_no, error_code)
) WITHOUT ROWID;

-- Rows stand by index, so that a chunk of tasks is a few pages to write: by task_id, which is a hash, each would be a
-- page of its own. sort_key is the first 60 bits of the task_id, whose order the listing follows; the task_id itself
-- is made from the run and the index.
CREATE TABLE tasks (
    run_no INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    shard INTEGER NOT NULL,
    sort_key INTEGER NOT NULL,
    status INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    http_status INTEGER,
    error_code TEXT,
    finished_at REAL,
    input TEXT NOT NULL,
    detail TEXT,
    PRIMARY KEY (run_no, idx)
) WITHOUT ROWID;
CREATE INDEX tasks_by_id ON tasks (run_no, shard, sort_key);
CREATE INDEX tasks_failed ON tasks (run_no, shard, sort_key) WHERE status = 2;

CREATE TABLE task_events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run_no INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    at REAL NOT NULL,
    event TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX task_events_by_run ON task_events (run_no, seq);
CREATE INDEX task_events_by_task ON task_events (run_no, idx, seq);

CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL,
    visible_at REAL NOT NULL,
    receives INTEGER NOT NULL DEFAULT 0,
    -- Grows with every delivery, also of a message that was given back uncounted; part of its receipt.
    delivery INTEGER NOT NULL DEFAULT 0,
    -- Deliveries on which work had begun, and the last of them.
    starts INTEGER NOT NULL DEFAULT 0,
    started INTEGER NOT NULL DEFAULT 0,
    -- 1 from receive until ack, release or lapse.
    held INTEGER NOT NULL DEFAULT 0,
    body BLOB NOT NULL
);
CREATE INDEX messages_due ON messages (queue, visible_at, id);

CREATE TABLE dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL,
    body BLOB NOT NULL,
    reason TEXT NOT NULL,
    at REAL NOT NULL
);

CREATE TABLE leases (
    name TEXT PRIMARY KEY,
    holder TEXT NOT NULL,
    fence INTEGER NOT NULL,
    expires_at REAL NOT NULL
) WITHOUT ROWID;
