// The rules and the dashboards as a monitoring mixin, read from the files that everything else uses.
{
  // How your routes call the severities: { page: 'critical', critical: 'warning' }.
  _config+:: { severities: {} },

  // jsonnet's YAML knows no anchors, and the file has one.
  local text = importstr '../../alerts/rules/headroom.yaml',
  local model = std.split(std.split(text, '&model ')[1], '}\n')[0],
  local rules = std.parseYaml(std.strReplace(std.strReplace(text, '&model ', ''), '*model', model)),
  local severities = $._config.severities,
  local rename(rule) =
    if 'alert' in rule
    then rule { labels+: { severity: std.get(severities, rule.labels.severity, rule.labels.severity) } }
    else rule,
  local renamed = [group { rules: [rename(rule) for rule in group.rules] } for group in rules.groups],
  local holds_alerts(group) = std.length([rule for rule in group.rules if 'alert' in rule]) > 0,

  prometheusAlerts+:: { groups+: [group for group in renamed if holds_alerts(group)] },
  prometheusRules+:: { groups+: [group for group in renamed if !holds_alerts(group)] },
  grafanaDashboards+:: {
    'headroom.json': import '../../dashboards/headroom.json',
    'headroom-fleet.json': import '../../dashboards/headroom-fleet.json',
    'headroom-incident.json': import '../../dashboards/headroom-incident.json',
  },
}
