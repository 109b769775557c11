"""Public prices of AWS in dollars: us-east-1, on demand, in 2026. For the benchmarks and `conveyor deploy aws`.

Where those of the stack come from, as of November 2026:
- Fargate: https://aws.amazon.com/fargate/pricing/, as https://fortem.dev/fargate-spot/ has it of June 2026, with Spot.
- Load balancer: https://aws.amazon.com/elasticloadbalancing/pricing/, as
  https://cal53.calculator.city/aws-alb-cost-calculator/ has it.
- Addresses and endpoints: https://aws.amazon.com/vpc/pricing/ and https://aws.amazon.com/privatelink/pricing/, as
  https://www.factualminds.com/blog/amazon-vpc-pricing-endpoints-peering-transit-gateway/ has them of June 2026.
- Aurora: https://aws.amazon.com/rds/aurora/pricing/, as https://c3x.dev/blog/aws-aurora-serverless-v2-cost/ has it.
- Valkey: https://aws.amazon.com/elasticache/pricing/. AWS's price list of June 2025 has Valkey at four fifths of
  Redis (cache.c7gn.large, reserved: 0.1384 and 0.173), and cache.m7g.large is 0.158 with Redis.
"""

# For a million. DynamoDB's units: a write of up to 1 KB, a consistent read of up to 4 KB. SQS bills a call for each
# 64 KB. S3 bills PUT and LIST alike, and takes nothing for DELETE.
PRICES = {
    "dynamodb write unit": 0.625,
    "dynamodb read unit": 0.125,
    "sqs request": 0.40,
    "s3 put": 5.00,
    "s3 get": 0.40,
}
# For a GB and month.
DYNAMODB_STORAGE, S3_STORAGE = 0.25, 0.023

# For an hour. A load balancer bills its traffic too, beyond that of an idle one.
FARGATE_VCPU, FARGATE_GB = 0.04048, 0.004445
LOAD_BALANCER = 0.0225
PUBLIC_ADDRESS = 0.005
INTERFACE_ENDPOINT = 0.01
AURORA_UNIT = 0.12
VALKEY_NODES = {
    "cache.t4g.micro": 0.0128,
    "cache.t4g.small": 0.0256,
    "cache.t4g.medium": 0.052,
    "cache.m7g.large": 0.1264,
    "cache.m7g.xlarge": 0.2520,
    "cache.r7g.large": 0.1752,
    "cache.r7g.xlarge": 0.3496,
}
# What Spot takes of the price on demand, which moves between three and five tenths.
SPOT_SHARE = 0.4

# For a month.
SECRET, ALARM, METRIC, DASHBOARD = 0.40, 0.10, 0.30, 3.00

# A million small tasks with a body each, over their whole life, as `python -m bench aws` counts them.
MILLION_TASKS = {"writing and running": 1.42, "14 days of storage": 0.07, "deletion": 0.65}
# What a million pages of half a second keep a worker with 100 slots busy.
MILLION_WORKER_HOURS = 83 / 60

# Read units a second of housekeeping roles that have nothing to do (outbox, deliveries, retention, monitor, scheduler):
# ten that look at sixteen partitions every two seconds.
IDLE_READ_UNITS = 10 * 16 * 0.5 / 2
# Requests a second of a process that polls an empty queue for 20 seconds at a time.
IDLE_POLLS = 1 / 20

HOURS_A_MONTH = 730.0
