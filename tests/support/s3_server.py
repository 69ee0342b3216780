#!/usr/bin/env python3
"""An S3 server on loopback for tests, which checks signatures as S3 does: s3_server.py [--flaky] [--session]

Prints one line of JSON, the environment variables that a client needs, and serves until it is ended. There is one bucket,
"runs". With --session the credentials are those of a role, with a session token. With --flaky every third request is
answered with 503, and every fourth answer with a body is cut in its middle.
"""

import json
import logging
import os
import sys
import threading

try:
    # How many requests are let in unsigned: those that main() makes.
    os.environ.update(INITIAL_NO_AUTH_ACTION_COUNT="4", MOTO_IAM_LOAD_MANAGED_POLICIES="false",
                      MOTO_S3_DEFAULT_MAX_KEYS="20", AWS_ACCESS_KEY_ID="none",
                      AWS_SECRET_ACCESS_KEY="none", AWS_EC2_METADATA_DISABLED="true", NO_PROXY="127.0.0.1")
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server
except ImportError as error:
    print(json.dumps({"skipped": str(error)}), flush=True)
    sys.exit(77)

BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Flaky:
    """Fails now and then in front of `app`."""

    def __init__(self, app):
        self.app, self.active, self.requests, self.bodies, self.lock = app, False, 0, 0, threading.Lock()

    def __call__(self, environ, start_response):
        if not self.active:
            return self.app(environ, start_response)
        with self.lock:
            self.requests += 1
            busy = self.requests % 3 == 0
        if busy:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(BUSY)))])
            return [BUSY]
        body = b"".join(self.app(environ, start_response))
        with self.lock:
            self.bodies += len(body) > 1
            cut = len(body) > 1 and self.bodies % 4 == 0
        return self.half(body) if cut else [body]

    @staticmethod
    def half(body):
        yield body[:len(body) // 2]
        raise ConnectionAbortedError("cut on purpose")


def main():
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    app = Flaky(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    options = dict(endpoint_url=endpoint, region_name="eu-central-1")
    policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    iam = boto3.client("iam", **options)
    if "--session" in sys.argv:
        iam.create_role(RoleName="tester", AssumeRolePolicyDocument=json.dumps(policy))
        iam.put_role_policy(RoleName="tester", PolicyName="all", PolicyDocument=json.dumps(policy))
        sts = boto3.client("sts", **options)
        key = sts.assume_role(RoleArn="arn:aws:iam::123456789012:role/tester", RoleSessionName="test")["Credentials"]
    else:
        iam.create_user(UserName="tester")
        iam.put_user_policy(UserName="tester", PolicyName="all", PolicyDocument=json.dumps(policy))
        key = iam.create_access_key(UserName="tester")["AccessKey"]
    boto3.client("s3", **options).create_bucket(
        Bucket="runs", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    app.active = "--flaky" in sys.argv
    print(json.dumps({"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "eu-central-1", "NO_PROXY": "127.0.0.1",
                      "AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
                      "AWS_SESSION_TOKEN": key.get("SessionToken", "")}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
