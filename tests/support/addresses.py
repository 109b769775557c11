"""What a guard must see through: addresses that are not public and ways to write them, and some that are public."""

# ruff: noqa: RUF001, SIM905  (letters that look like digits are the point; a table is read as one)

import msgspec

REFUSED = """
0.0.0.0 0.0.0.1 0.255.255.255
10.0.0.0 10.0.0.1 10.255.255.255
100.64.0.0 100.64.0.1 100.100.100.200 100.127.255.255
127.0.0.0 127.0.0.1 127.0.0.2 127.1.2.3 127.255.255.255
168.63.129.16
169.254.0.0 169.254.169.254 169.254.170.2 169.254.255.255
172.16.0.0 172.16.0.1 172.20.10.1 172.31.255.255
192.0.0.0 192.0.0.1 192.0.0.170 192.0.0.192 192.0.0.255
192.0.2.0 192.0.2.1 192.0.2.255
192.88.99.1
192.168.0.0 192.168.0.1 192.168.1.1 192.168.255.255
198.18.0.0 198.18.0.1 198.19.255.255
198.51.100.0 198.51.100.7 203.0.113.0 203.0.113.9
224.0.0.0 224.0.0.1 232.1.2.3 239.255.255.250 239.255.255.255
240.0.0.0 240.0.0.1 250.1.2.3 255.255.255.254 255.255.255.255
:: ::1 ::2 ::127.0.0.1 ::7f00:1 ::10.0.0.1 ::8.8.8.8 ::ffff
::ffff:0.0.0.0 ::ffff:10.1.2.3 ::ffff:127.0.0.1 ::ffff:7f00:1 ::ffff:169.254.169.254 ::ffff:192.168.1.1
::ffff:100.64.0.1 ::ffff:224.0.0.1 ::ffff:255.255.255.255 ::ffff:0:127.0.0.1
64:ff9b::0.0.0.0 64:ff9b::10.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b::192.168.0.1 64:ff9b::100.64.0.1
64:ff9b:1:: 64:ff9b:1::1 64:ff9b:1::a9fe:a9fe 64:ff9b:1:a9fe:a9:fe00:: 64:ff9b:1:ffff::8.8.8.8 64:ff9b::1:8.8.8.8
2002:: 2002:0a00:0001:: 2002:7f00:1:: 2002:7f00:0001::1 2002:a9fe:a9fe:: 2002:c0a8:101::1 2002:6440:1::
2001::1 2001:0:7f00:1:: 2001:0:0a00:1::f7f7:f7f7 2001:0:808:808::80ff:fffe 2001:0:808:808::5601:5601
2001:1::1 2001:2::1 2001:3::1 2001:4:112::1 2001:10::1 2001:20::1 2001:1ff:ffff::
2001:db8:: 2001:db8::1 2001:db8:ffff:: 3fff:: 3fff:fff:: 100:: 100::1 100:0:0:1:: 5f00::1
fc00:: fc00::1 fd00::1 fd00:ec2::254 fd12:3456:789a::1 fdff:ffff::
fe80:: fe80::1 fe80::1%1 fe80::a9fe:a9fe febf::1 fec0::1 feff::1
ff00:: ff01::1 ff02::1 ff02::fb ff05::2 ff0e::1 ffff::1
400::1 1000::1 1fff::1 4000::1 8000::1 a000::1 e000::1 f000::1
2606:4700::5efe:7f00:1 2606:4700::5efe:10.0.0.1 2606:4700::200:5efe:169.254.169.254
""".split()

ALLOWED = """
1.0.0.1 1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 93.184.216.34 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.1
151.101.1.69 168.63.129.15 168.63.129.17 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 192.0.1.0
192.0.3.0 192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 198.51.99.255 198.51.101.0 203.0.112.255
203.0.114.0 223.255.255.255
2000::1 2001:200::1 2001:4860:4860::8888 2001:db7::1 2001:db9::1 2003::1 2400:cb00::1 2606:4700::1111
2620:fe::fe 2a00:1450:4001::200e 3ffe::1 3fff:1000::1
::ffff:8.8.8.8 ::ffff:101:101 64:ff9b::8.8.8.8 64:ff9b::808:808 2002:808:808:: 2001:0:808:808::f7f7:f7f7
2606:4700::5efe:8.8.8.8
""".split()

# Hosts as they may stand in a URL, each of them this machine or one beside it once it is parsed or resolved.
LOOPBACK_HOSTS = """
127.0.0.1 127.0.0.2 127.1 127.0.1 127.255.255.254 2130706433 017700000001 0x7f000001 0x7F000001 0x7f.1 0x7f.0.0.1
0177.0.0.1 0177.0.0.01 0177.0.0x0.1 00000177.0.0.1 127.0.0.0x1 127.0x000001 127.00.00.01 127.0.0.1. 0x7f.0x0.0x0.0x1
%31%32%37.0.0.1 127%2e0%2e0%2e1 127.0.0.%31 １２７.0.0.1 127。0。0。1 127．0．0．1 ①②⑦.⓪.⓪.① 127｡1 ０ｘ7f.1
0 0.0.0.0 0x0 00 000.000 0.0 %30
[::1] [0:0:0:0:0:0:0:1] [0000::0001] [::0.0.0.1] [::] [0::0]
[::ffff:127.0.0.1] [::ffff:7f00:1] [::FFFF:7F00:0001] [0:0:0:0:0:ffff:127.0.0.1] [::127.0.0.1] [::7f00:1]
[64:ff9b::7f00:1] [64:ff9b::127.0.0.1] [64:ff9b:1::7f00:1] [2002:7f00:1::] [2002:7f00:1::1] [2001:0:7f00:1::]
[::ffff:0:127.0.0.1]
localhost LOCALHOST LocalHost. localhost. sub.localhost ⓛⓞⓒⓐⓛⓗⓞⓢⓣ loca%6chost lo­calhost
""".split()

PRIVATE_HOSTS = """
169.254.169.254 169.254.43518 0xa9fea9fe 2852039166 0251.0376.0251.0376 0xa9.0xfe.0xa9.0xfe 169.254.169.254.
[::ffff:169.254.169.254] [::ffff:a9fe:a9fe] [64:ff9b::a9fe:a9fe] [2002:a9fe:a9fe::] [::a9fe:a9fe] [fd00:ec2::254]
10.0.0.1 10.1 0xa000001 167772161 012.0.0.1 172.16.0.1 192.168.1.1 192.168.257 3232235777 0xc0a80101
100.64.0.1 100.100.100.200 192.0.0.192 168.63.129.16 198.18.0.1 224.0.0.1 239.255.255.250 255.255.255.255 240.0.0.1
[fe80::1] [fc00::1] [fd12:3456::1] [ff02::1] [2001:db8::1] [100::1] [3fff::1]
""".split()

# Names, and all addresses that the DNS has for each. One bad address is enough.
EVIL_NAMES: dict[str, list[str]] = {
    "loopback.example": ["127.0.0.1"],
    "loopback6.example": ["::1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "any.example": ["0.0.0.0"],
    "any6.example": ["::"],
    "metadata.example": ["169.254.169.254"],
    "private.example": ["10.0.0.1"],
    "nat64.example": ["64:ff9b::7f00:1"],
    "sixtofour.example": ["2002:7f00:1::"],
    "scoped.example": ["fe80::1%1"],
    "mixed.example": ["93.184.216.34", "127.0.0.1"],
    "mixed6.example": ["2606:4700::1111", "::1"],
    "mixed-last.example": ["1.1.1.1", "8.8.8.8", "2606:4700::1111", "::ffff:10.0.0.1"],
    "127.0.0.1.nip.example": ["127.0.0.1"],
    "xn--bcher-kva.example": ["127.0.0.1"],
    "localhost.": ["127.0.0.1"],
    "localhost": ["127.0.0.1", "::1"],
    "sub.localhost": ["127.0.0.1"],
}

# URLs that are not even looked up.
BAD_URLS = [
    "",
    " ",
    "nothing",
    "//site.example/",
    "/path",
    "http:",
    "http://",
    "http:///",
    "http:///127.0.0.1/",
    "http:/127.0.0.1/",
    "http:127.0.0.1",
    "http:\\\\127.0.0.1\\",
    "http://\\127.0.0.1/",
    "https:site.example",
    "ftp://site.example/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:6379/_INFO",
    "dict://127.0.0.1:11211/",
    "javascript:alert(1)",
    "data:text/plain,hello",
    "ws://site.example/",
    "unix:/run/docker.sock",
    "http+unix://%2Frun%2Fdocker.sock/",
    "http://user@site.example/",
    "http://user:password@site.example/",
    "http://:password@site.example/",
    "http://site.example@127.0.0.1/",
    "http://site.example:80@127.0.0.1/",
    "http://site.example:0/",
    "http://site.example:00/",
    "http://site.example:65536/",
    "http://site.example:-1/",
    "http://site.example:http/",
    "http://site .example/",
    "http://site%00.example/",
    "http://site%20.example/",
    "http://site..example/",
    "http://.../",
    "http://[::1/",
    "http://[::1%25lo]/",
    "http://[fe80::1%eth0]/",
    "http://[127.0.0.1]/",
    "http://[]/",
    "http://1.2.3.4.5/",
    "http://256.256.256.256/",
    "http://127.0.0.1.1/",
    "http://0x100000000/",
    "http://4294967296/",
    "http://xn--a/",
    "http://site.example/\r\nHost: evil.example",
    "http://site.example/\nX",
    "http://site.exa\tmple/",
    "\thttp://site.example/",
    "http://site.example/\x00",
    "http://site.example/\x7f",
    "http://site.example/\u2028",
    "http://site.example/\ud800",
    "http://site.example/" + "a" * 8192,
    "http://" + "a." * 127 + "example/",
]

GOOD_URLS = [
    "http://site.example",
    "http://site.example/",
    "HTTP://SITE.EXAMPLE/",
    "https://site.example:8443/a?b=c#d",
    "http://site.example:65535/",
    "http://site.example:1/",
    "http://site.example./",
    "http://site.example/a b",
    "http://site.example/?q=a@b&c=\\",
    "http://site.example/users/@me//x///y",
    "http://site.example/at:0/x",
    "http://bücher.example/straße?ö=ü",
    "http://under_score.example/",
    "http://127.0.0.1:8080/",
    "http://[::1]:8080/",
    "http://0x7f000001/",
    "http://@site.example/",
]


def as_input(url: str) -> str:
    """The URL as the input of a fetch task."""
    return msgspec.json.encode(url).decode()
