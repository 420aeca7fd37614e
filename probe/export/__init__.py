"""What kvoncall gives to Prometheus, Alertmanager and Grafana: rules, routes, boards, and the tests that prove them."""
