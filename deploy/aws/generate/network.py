"""The network: a VPC of two public subnets unless one is named, endpoints, security groups, the load balancer.

Tasks have public addresses and no open port: workers fetch from the internet, of which a NAT gateway would bill each
GB.
"""

from typing import Any

from deploy.aws.generate.intrinsics import Intrinsic, att, either, ref, sub

VPC = either("MakesVpc", ref("Vpc"), ref("VpcId"))
SUBNETS = either("MakesVpc", [ref("SubnetA"), ref("SubnetB")], ref("SubnetIds"))
_PORT = 8080
# Those that the monitor needs as a Lambda, which has no public address; then those of tasks without one.
_LAMBDA_SERVICES = {"Sqs": "sqs", "States": "states"}
_TASK_SERVICES = {"EcrApi": "ecr.api", "EcrDkr": "ecr.dkr", "Logs": "logs", "Secrets": "secretsmanager"}


def _made(kind: str, properties: dict[str, Any], condition: str = "MakesVpc", **more: Any) -> dict[str, Any]:
    return {"Type": f"AWS::EC2::{kind}", "Condition": condition, **more, "Properties": properties}


def _subnet(number: int) -> dict[str, Any]:
    zone = Intrinsic("!Select", [number, Intrinsic("!GetAZs", "")])
    return _made(
        "Subnet",
        {"VpcId": ref("Vpc"), "CidrBlock": f"10.42.{number}.0/24", "AvailabilityZone": zone},
    )


def _associated(subnet: str) -> dict[str, Any]:
    return _made("SubnetRouteTableAssociation", {"SubnetId": ref(subnet), "RouteTableId": ref("Routes")})


def _gateway(service: str) -> dict[str, Any]:
    return _made(
        "VPCEndpoint",
        {
            "VpcEndpointType": "Gateway",
            "VpcId": ref("Vpc"),
            "ServiceName": sub(f"com.amazonaws.${{AWS::Region}}.{service}"),
            "RouteTableIds": [ref("Routes")],
        },
    )


def _interface(service: str, condition: str) -> dict[str, Any]:
    return _made(
        "VPCEndpoint",
        {
            "VpcEndpointType": "Interface",
            "VpcId": ref("Vpc"),
            "ServiceName": sub(f"com.amazonaws.${{AWS::Region}}.{service}"),
            "PrivateDnsEnabled": True,
            "SubnetIds": [ref("SubnetA"), ref("SubnetB")],
            "SecurityGroupIds": [ref("EndpointsGroup")],
        },
        condition,
    )


def _group(
    description: str, rules: list[dict[str, Any]], condition: str = "HasAll", vpc: Intrinsic = VPC
) -> dict[str, Any]:
    properties: dict[str, Any] = {"GroupDescription": description, "VpcId": vpc, "SecurityGroupIngress": rules}
    return _made("SecurityGroup", properties, condition)


def _from(group: str, *ports: int) -> list[dict[str, Any]]:
    return [
        {
            "Description": f"from {group}",
            "IpProtocol": "tcp",
            "FromPort": port,
            "ToPort": port,
            "SourceSecurityGroupId": ref(group),
        }
        for port in ports
    ]


def _from_users(port: int) -> dict[str, Any]:
    return {
        "Description": "from users",
        "IpProtocol": "tcp",
        "FromPort": port,
        "ToPort": port,
        "CidrIp": ref("AllowedCidr"),
    }


NETWORK: dict[str, Any] = {
    "Vpc": _made("VPC", {"CidrBlock": "10.42.0.0/16", "EnableDnsSupport": True, "EnableDnsHostnames": True}),
    "Gateway": _made("InternetGateway", {"Tags": [{"Key": "Name", "Value": ref("Prefix")}]}),
    "GatewayAttachment": _made("VPCGatewayAttachment", {"VpcId": ref("Vpc"), "InternetGatewayId": ref("Gateway")}),
    "Routes": _made("RouteTable", {"VpcId": ref("Vpc")}),
    "DefaultRoute": _made(
        "Route",
        {"RouteTableId": ref("Routes"), "DestinationCidrBlock": "0.0.0.0/0", "GatewayId": ref("Gateway")},
        DependsOn="GatewayAttachment",
    ),
    "SubnetA": _subnet(0),
    "SubnetB": _subnet(1),
    "SubnetARoutes": _associated("SubnetA"),
    "SubnetBRoutes": _associated("SubnetB"),
    "S3Endpoint": _gateway("s3"),
    "DynamoEndpoint": _gateway("dynamodb"),
    **{f"{name}Endpoint": _interface(service, "NeedsEndpoints") for name, service in _LAMBDA_SERVICES.items()},
    **{f"{name}Endpoint": _interface(service, "WantsEndpoints") for name, service in _TASK_SERVICES.items()},
    "BalancerGroup": _group("Load balancer of Conveyor", [_from_users(80), _from_users(443)]),
    "TasksGroup": _group("Tasks of Conveyor", _from("BalancerGroup", _PORT)),
    "StoresGroup": _group("Valkey and Postgres of Conveyor", _from("TasksGroup", 6379, 5432)),
    "EndpointsGroup": _group("Endpoints of AWS services", _from("TasksGroup", 443), "NeedsEndpoints", ref("Vpc")),
}

_FORWARD = [{"Type": "forward", "TargetGroupArn": ref("ApiTargets")}]
_TO_TLS = [{"Type": "redirect", "RedirectConfig": {"Protocol": "HTTPS", "Port": "443", "StatusCode": "HTTP_301"}}]


def _balancing(kind: str, properties: dict[str, Any], condition: str = "HasAll") -> dict[str, Any]:
    return {"Type": f"AWS::ElasticLoadBalancingV2::{kind}", "Condition": condition, "Properties": properties}


BALANCER: dict[str, Any] = {
    "Balancer": _balancing(
        "LoadBalancer",
        {
            "Type": "application",
            "Scheme": ref("LoadBalancerScheme"),
            "Subnets": either("MakesVpc", [ref("SubnetA"), ref("SubnetB")], ref("LoadBalancerSubnetIds")),
            "SecurityGroups": [ref("BalancerGroup")],
            "LoadBalancerAttributes": [
                {"Key": "idle_timeout.timeout_seconds", "Value": "60"},
                {"Key": "routing.http.drop_invalid_header_fields.enabled", "Value": "true"},
            ],
        },
    ),
    "ApiTargets": _balancing(
        "TargetGroup",
        {
            "VpcId": VPC,
            "TargetType": "ip",
            "Protocol": "HTTP",
            "Port": _PORT,
            "HealthCheckPath": "/healthz",
            "HealthCheckIntervalSeconds": 10,
            "HealthCheckTimeoutSeconds": 5,
            "HealthyThresholdCount": 2,
            "UnhealthyThresholdCount": 3,
            "Matcher": {"HttpCode": "200"},
            "TargetGroupAttributes": [{"Key": "deregistration_delay.timeout_seconds", "Value": "60"}],
        },
    ),
    "Listener": _balancing(
        "Listener",
        {
            "LoadBalancerArn": ref("Balancer"),
            "Port": 80,
            "Protocol": "HTTP",
            "DefaultActions": either("HasCertificate", _TO_TLS, _FORWARD),
        },
    ),
    "TlsListener": _balancing(
        "Listener",
        {
            "LoadBalancerArn": ref("Balancer"),
            "Port": 443,
            "Protocol": "HTTPS",
            "SslPolicy": "ELBSecurityPolicy-TLS13-1-2-2021-06",
            "Certificates": [{"CertificateArn": ref("CertificateArn")}],
            "DefaultActions": _FORWARD,
        },
        "HasCertificate",
    ),
}

URL = either("HasPublicUrl", ref("PublicUrl"), sub("http://${Balancer.DNSName}"))
BALANCER_NAME = att("Balancer.LoadBalancerFullName")
