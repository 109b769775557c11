/**
 * Types of the API responses, as far as the dashboard reads them. `/v1/openapi.json` has all of them.
 *
 * @typedef {{succeeded: number, failed: number, cancelled: number, unchanged?: number}} Ended `unchanged`: of the succeeded
 * @typedef {Ended & {pending: number, running: number}} Counts
 * @typedef {{code: string, message: string}} TaskError
 * @typedef {{code: string, count: number}} ErrorCount
 *
 * @typedef {{task_id: string, index: number, attempt: number, at: string, message: string, http_status: number | null}} ErrorSample
 *
 * @typedef {Object} ErrorGroup
 * @property {string | null} code
 * @property {string | null} host
 * @property {boolean} is_other
 * @property {number} failed
 * @property {number} retried
 * @property {string | null} last_at
 * @property {ErrorSample[]} samples
 *
 * @typedef {{run_id: string, is_exact: boolean, at: string | null, failed: number, retried: number, items: ErrorGroup[]}} ErrorGroups
 *
 * @typedef {Object} HostAttempts
 * @property {number} attempts
 * @property {number} succeeded
 * @property {number} failed
 * @property {number} retried
 * @property {number} rate
 * @property {number | null} p50
 * @property {number | null} p95
 *
 * @typedef {Object} HostFacts
 * @property {string | null} host
 * @property {ErrorCount[]} errors
 * @property {{target: string, state: string, until: string, error: string | null} | null} breaker
 * @property {{limit: number, in_flight: number, paused_until: string | null} | null} pace
 *
 * @typedef {HostAttempts & HostFacts} RunHost
 * @typedef {{run_id: string, is_exact: boolean, at: string | null, items: RunHost[], other: HostAttempts | null, missing: number}} RunHosts
 *
 * @typedef {Object} Lineage
 * @property {string} parent
 * @property {string[]} status
 * @property {string | null} error_code
 * @property {number | null} http_status
 * @property {string | null} tag
 * @property {string | null} host
 * @property {number[]} indexes
 * @property {boolean} changed_only
 * @property {Record<string, unknown>} options
 *
 * @typedef {Object} Run
 * @property {string} id
 * @property {number} number
 * @property {string} state
 * @property {number} total
 * @property {Counts} counts
 * @property {string} created_at
 * @property {string | null} ended_at
 * @property {Lineage | null} lineage
 *
 * @typedef {Object} Job
 * @property {string} id
 * @property {string | null} name
 * @property {string} kind
 * @property {string} mode
 * @property {Record<string, any>} options those that differ from the defaults; secrets are hidden
 * @property {string} state
 * @property {string | null} reason
 * @property {string | null} reason_code
 * @property {Waiting | null} waiting
 * @property {string} created_at
 * @property {string | null} expires_at null while the latest run has not finished
 * @property {number} total
 * @property {Counts} counts by the latest outcome of each task, over all runs
 * @property {Run} run the latest
 * @property {Run[]} runs only of a single job
 * @property {{tasks: number, bytes_read: number, bytes_total: number | null} | null} ingest
 * @property {number} invalid_lines
 * @property {number} rate
 * @property {number | null} eta
 * @property {{p50: number, p95: number} | null} task_time
 * @property {Progressed & {tasks: number} | null} transfers downloads in progress, together
 *
 * @typedef {Object} Waiting
 * @property {string} code
 * @property {string} detail
 * @property {string | null} until
 * @property {string | null} target of a breaker
 * @property {string | null} error that opened it
 *
 * @typedef {Object} Progress progress of a job's stream
 * @property {string} run_id
 * @property {string} state
 * @property {string | null} reason
 * @property {Waiting | null} waiting
 * @property {number} total
 * @property {Ended} counts
 * @property {{total: number, counts: Ended}} job
 *
 * @typedef {Ended & {at: string}} Sample
 * @typedef {{seconds: number, count: number}} Duration
 * @typedef {{seconds: number, items: {at: string, succeeded: number, failed: number, retried: number}[]}} Series
 * @typedef {{run_id: string, samples: Sample[], series: Series, durations: Duration[], errors: ErrorCount[]}} Statistics
 *
 * @typedef {Object} Task
 * @property {string} task_id
 * @property {number} index
 * @property {unknown} input
 * @property {string} status
 * @property {boolean} unchanged
 * @property {number} attempts
 * @property {number | null} http_status
 * @property {TaskError | null} error
 * @property {string | null} content_type
 * @property {number | null} size
 * @property {string | null} sha256
 * @property {string | null} final_url
 * @property {[string, string][] | null} headers
 * @property {number | null} elapsed
 * @property {string | null} finished_at
 * @property {number} [first_byte]
 * @property {string} [worker] that attempts it, or made its last attempt, if that was slow
 * @property {boolean} [running] whether an attempt has it now
 * @property {unknown} extracted null if it is too long, too
 * @property {string | null} extracted_url
 * @property {Progressed & {note: string | null}} [progress]
 *
 * @typedef {{done: number, total: number | null, rate: number | null}} Progressed
 *
 * @typedef {{at: string, event: string, data: Record<string, any>}} Event
 * @typedef {{line: number, reason: string, text: string}} InvalidLine
 *
 * @typedef {Object} Export
 * @property {string} id
 * @property {string} state
 * @property {TaskError | null} error
 * @property {string} format
 * @property {string} compression
 * @property {string} created_at
 * @property {{tasks: number, total: number}} progress
 * @property {{tasks: number}} counts
 * @property {{name: string, size: number, url: string}[]} parts
 *
 * @typedef {{at: string, status: number | null, error: string | null, seconds: number, answer: string | null}} Attempt
 *
 * @typedef {Object} Delivery
 * @property {string} id
 * @property {string | null} job_id null for a test
 * @property {string} event
 * @property {string} status
 * @property {number} attempts
 * @property {string | null} next_attempt_at
 * @property {Attempt[]} log
 *
 * @typedef {Object} Webhook
 * @property {string} id
 * @property {string} url
 * @property {string[] | null} events
 * @property {string | null} description
 * @property {boolean} disabled
 * @property {string | null} reason
 * @property {string | null} failing_since
 * @property {string | null} error of the first attempt that failed since then
 * @property {string} created_at
 *
 * @typedef {Webhook & {deliveries: {delivered: number, failed: number, pending: number}}} WebhookDetail
 *
 * @typedef {Object} Fire
 * @property {string} at
 * @property {string | null} job_id
 * @property {string | null} error
 * @property {number} coalesced
 * @property {{name: string | null, state: string, total: number, counts: Counts, invalid_lines: number} | null} [outcome] of its job, while it
 *   is there; only where one schedule is shown
 *
 * @typedef {Object} Schedule
 * @property {string} id
 * @property {string | null} name
 * @property {string} cron
 * @property {string} cron_text the expression in words
 * @property {string} timezone
 * @property {string} missed
 * @property {boolean} changed_only
 * @property {boolean} paused
 * @property {string[]} next_fires
 * @property {number} fired
 * @property {Fire[]} fires
 * @property {number} invalid_lines
 * @property {Record<string, any>} job
 *
 * @typedef {{tenant: string, active_keys: number, keys: number, created_at: string}} Tenant
 *
 * @typedef {Object} Letter
 * @property {string} id
 * @property {string} queue
 * @property {string} job_id
 * @property {string | null} task_id
 * @property {number | null} index
 * @property {string | null} error_code
 * @property {string} reason
 * @property {string} at
 * @property {string} redrive_effect what a redrive does now, in a sentence
 *
 * @typedef {{job_id: string, run_id: string | null, dead_letters: number}} RedriveRun
 * @typedef {{redriven: number, skipped: number, requeued: number, blocked: number, runs: RedriveRun[]}} Redriven
 *
 * @typedef {Object} Breaker
 * @property {string} target
 * @property {string} state
 * @property {string | null} error
 * @property {string} since
 * @property {string} until
 * @property {number} times
 * @property {number} at_once
 * @property {string[]} runs
 *
 * @typedef {{at: string, succeeded: number, failed: number, retried: number, waiting: number, running: number}} LoadPoint
 * @typedef {{seconds: number, items: LoadPoint[]}} LoadSeries
 * @typedef {{minutes: LoadSeries, hours: LoadSeries}} Load
 *
 * @typedef {{ready: number, held: number, delayed: number}} Depth
 *
 * @typedef {Object} Lane
 * @property {string} job_id
 * @property {string} run_id
 * @property {string | null} name
 * @property {string} state
 * @property {number} priority
 * @property {number} concurrency
 * @property {number} running
 * @property {Depth} queue
 * @property {Depth} recovery
 * @property {Waiting | null} waiting
 *
 * @typedef {{name: string, at: string, tasks: {job_id: string, index: number}[]}} BusyWorker
 *
 * @typedef {Object} FleetWorker
 * @property {string} name
 * @property {string} host
 * @property {number} process
 * @property {string} version
 * @property {number} slots
 * @property {string[] | null} handlers
 * @property {string} started_at
 * @property {string} at
 *
 * @typedef {Object} Key
 * @property {string} key_id
 * @property {string} tenant
 * @property {string | null} name
 * @property {boolean} admin
 * @property {string} created_at
 * @property {string | null} expires_at
 * @property {string | null} revoked_at
 */

export {};
